"""Parameter files: what rules there are, what a file says of one, and whose plan fits."""

import contextlib
import importlib
import shlex
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from env.errors import InputError, validation_message
from env.inputs.yaml_files import read_yaml
from env.scenario import Scenario

PARAMETER_FOLDER = Path(__file__).parent / "parameters"
"""The files that ship; those in subfolders are for one scenario each."""

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


def read_rule(path: Path) -> tuple[Any, Any]:
    """
    A parameter file.

    :param path: of a YAML file
    :return: the rule's class (a `Controller`), and its parameters
    :raises InputError: one line that names what is wrong and what is allowed
    """
    content = read_yaml(path, "a policy", f"give a YAML file or one of: {', '.join(names())}")
    name = content.pop("rule", None) if isinstance(content, dict) else None
    if not isinstance(name, str) or name not in RULES:
        raise InputError(f"{path}: rule: must be one of {', '.join(RULES)}")
    module, _, class_name = RULES[name].rpartition(".")
    rule = getattr(importlib.import_module(module), class_name)
    try:
        return rule, rule.schema.model_validate(content)
    except ValidationError as error:
        allowed = f"; allowed are {', '.join(rule.schema.model_fields)}"
        raise InputError(validation_message(path, error, allowed)) from error


def what_fits(name: str, scenario: Scenario) -> str:
    """
    What to give in place of a plan for other jobs, such that it is found from any folder.

    :param name: of the policy whose plan does not fit; a file of that name comes first
    :param scenario: what is to be run
    """
    files = sorted(PARAMETER_FOLDER.rglob("*.yaml"), key=lambda path: (path.stem != name, path))
    for path in files:
        with contextlib.suppress(InputError):
            _, parameters = read_rule(path)
            if sorted(parameters.planned_jobs) == sorted(scenario.job_names):
                given = path.stem if path.parent == PARAMETER_FOLDER else shlex.quote(str(path))
                return f"{given} fits (--policy {given})"
    return "concurrent is for any scenario (--policy concurrent)"
