"""
Policies by name.

A name is a shipped parameter file (`agents/parameters`), which says which rule it is for; a
path to a YAML file is a rule with parameters of your own; a `.zip` is a trained checkpoint.
"""

from pathlib import Path

from agents.parameter_files import PARAMETER_FOLDER, names, read_rule
from agents.policy import Policy
from env.errors import InputError
from env.scenario import Scenario


def make(name_or_path: str | Path) -> Policy:
    """
    A policy, ready for `reset`.

    :param name_or_path: a shipped policy, a YAML file with a rule's parameters, or a checkpoint
    :raises InputError: one line that names what is wrong and what is allowed
    """
    name, path = str(name_or_path), Path(name_or_path)
    if path.suffix == ".zip":
        from agents.general_checkpoint import is_general

        if is_general(path):
            from agents.ppo.general_policy import GeneralPolicy

            return GeneralPolicy.from_checkpoint(path)
        from agents.ppo.trained_policy import PPOPolicy

        return PPOPolicy.from_checkpoint(path)
    if name in names():
        path = PARAMETER_FOLDER / f"{name}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        raise InputError(
            f"unknown policy {name}; known are {', '.join(names())}, "
            "a parameter file (.yaml) or a checkpoint (.zip)"
        )
    rule, parameters = read_rule(path)
    return rule(path.stem, parameters)


def warn(policy: Policy, scenario: Scenario) -> None:
    """
    Warn on stderr if a checkpoint was trained for another scenario; rules are for any scenario.

    :param policy: what `make` made
    :param scenario: what it is to run
    :raises InputError: if the policy cannot run it at all
    """
    checkpoint = getattr(policy, "checkpoint", None)
    if checkpoint is not None:
        checkpoint.warn(scenario)
