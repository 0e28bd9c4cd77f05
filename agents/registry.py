"""
Policies by name.

A name is a shipped parameter file (`agents/parameters`), which says which rule it is for; a
path to a YAML file is a rule with parameters of your own; a `.zip` is a trained checkpoint.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agents.concurrent import Concurrent
from agents.heracles import Heracles
from agents.hybrid_prm import HybridPrm
from agents.hysteresis_pause import HysteresisPause
from agents.intel_prm import IntelPrm
from agents.latency_aware_prm import LatencyAwarePrm
from agents.parties import Parties
from agents.perfiso import PerfIso
from agents.policy import Controller, Policy
from agents.random_choice import RandomChoice
from agents.sequential import Sequential
from agents.shared_background import SharedBackground
from agents.static import Static
from agents.stats_poll_packed import StatsPollPacked
from agents.threshold_groups import ThresholdGroups
from env.errors import InputError, validation_message

PARAMETER_FOLDER = Path(__file__).parent / "parameters"

RULES: dict[str, type[Controller[Any]]] = {
    "sequential": Sequential,
    "concurrent": Concurrent,
    "threshold-groups": ThresholdGroups,
    "hysteresis-pause": HysteresisPause,
    "stats-poll-packed": StatsPollPacked,
    "shared-background": SharedBackground,
    "static": Static,
    "random": RandomChoice,
    "intel-prm": IntelPrm,
    "latency-aware-prm": LatencyAwarePrm,
    "hybrid-prm": HybridPrm,
    "heracles": Heracles,
    "parties": Parties,
    "perfiso": PerfIso,
}


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
        from agents.ppo import PPOPolicy

        policy: Policy = PPOPolicy.from_checkpoint(path)
        return policy
    if name in names():
        path = PARAMETER_FOLDER / f"{name}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        raise InputError(
            f"unknown policy {name}; known are {', '.join(names())}, "
            "a parameter file (.yaml) or a checkpoint (.zip)"
        )
    return _from_file(path)


def _from_file(path: Path) -> Controller[Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({type(error).__name__})") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise InputError(f"{path}: not valid YAML{line}") from error
    rule = content.pop("rule", None) if isinstance(content, dict) else None
    if not isinstance(rule, str) or rule not in RULES:
        raise InputError(f"{path}: rule: must be one of {', '.join(RULES)}")
    controller = RULES[rule]
    try:
        parameters = controller.schema.model_validate(content)
    except ValidationError as error:
        allowed = f"; allowed are {', '.join(controller.schema.model_fields)}"
        raise InputError(validation_message(path, error, allowed)) from error
    return controller(path.stem, parameters)
