"""
Policies by name.

A name is a shipped parameter file (`agents/parameters`), which says which rule it is for; a
path to a YAML file is a rule with parameters of your own; a `.zip` is a trained checkpoint.
"""

import importlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agents.policy import Controller, Policy
from env.errors import InputError, validation_message
from env.inputs.yaml_files import read_yaml
from env.scenario import Scenario

PARAMETER_FOLDER = Path(__file__).parent / "parameters"

RULES = {
    "sequential": "agents.rules.plain_strategies.Sequential",
    "concurrent": "agents.rules.plain_strategies.Concurrent",
    "threshold-groups": "agents.rules.threshold_groups.ThresholdGroups",
    "hysteresis-pause": "agents.rules.hysteresis_pause.HysteresisPause",
    "stats-poll-packed": "agents.rules.stats_poll_packed.StatsPollPacked",
    "shared-background": "agents.rules.shared_background.SharedBackground",
    "static": "agents.rules.static.Static",
    "random": "agents.rules.random_choice.RandomChoice",
    "intel-prm": "agents.rules.intel_prm.IntelPrm",
    "latency-aware-prm": "agents.rules.latency_aware_prm.LatencyAwarePrm",
    "hybrid-prm": "agents.rules.hybrid_prm.HybridPrm",
    "heracles": "agents.rules.heracles.Heracles",
    "parties": "agents.rules.parties.Parties",
    "queue": "agents.rules.queue.Queue",
    "perfiso": "agents.rules.perfiso.PerfIso",
}
"""Where each rule is: only the one that is asked for is imported."""


def names() -> list[str]:
    """The shipped policies."""
    return sorted(path.stem for path in PARAMETER_FOLDER.glob("*.yaml"))


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
    return _from_file(path)


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


def _from_file(path: Path) -> Controller[Any]:
    content = read_yaml(path, "a policy", f"give a YAML file or one of: {', '.join(names())}")
    rule = content.pop("rule", None) if isinstance(content, dict) else None
    if not isinstance(rule, str) or rule not in RULES:
        raise InputError(f"{path}: rule: must be one of {', '.join(RULES)}")
    module, _, name = RULES[rule].rpartition(".")
    controller: type[Controller[Any]] = getattr(importlib.import_module(module), name)
    try:
        parameters = controller.schema.model_validate(content)
    except ValidationError as error:
        allowed = f"; allowed are {', '.join(controller.schema.model_fields)}"
        raise InputError(validation_message(path, error, allowed)) from error
    return controller(path.stem, parameters)
