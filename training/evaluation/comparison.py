r"""
Policies side by side in the simulator, on load traces that none of them was trained on.

    python -m training.evaluate --policy threshold-groups --policy checkpoints/best.zip \
        --scenario cca-2025 --interval 10 --episodes 50 --seed 1 --json results.json

Every policy meets the same traces with the same random numbers, so that differences between
policies are differences between policies. Without `--policy` the scenario's trained policy is
compared with the reference controllers.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import agents
from agents.checkpoint import shipped_for
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import (
    OneLineParser,
    number,
    require_folder,
    require_writable,
    whole_number,
    write_json,
)
from env.scenario import Scenario, load_scenario
from env.simulator.load import MODULUS
from env.simulator.machine import EpisodeFactory, SimulatedMachine, Variation
from env.simulator.profile import Profile, load_profile
from training.evaluation.episodes import Run, repeats_of, run_episode, starts_from
from training.evaluation.family_comparison import (
    EPISODES,
    check_no_others,
    family_report,
    rule_names,
    show_family,
)
from training.evaluation.figures import (
    counted_p95,
    expected_violations,
    profile_report,
    report,
    show,
)
from training.evaluation.schedule_search import EVALUATIONS
from training.evaluation.timeline import IntervalRecorder, TimelineRecorder

REFERENCES = ("sequential", "concurrent", "threshold-groups")


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.evaluate",
        description="Compare policies in the simulator on paired load traces.",
    )
    add = line.add_argument
    add(
        "--policy",
        action="append",
        help="a shipped policy, a parameter file (.yaml) or a checkpoint (.zip); repeat it (the "
        f"scenario's checkpoint, {', '.join(REFERENCES)})",
    )
    add("--scenario", default="cca-2025", help="a shipped scenario or a YAML file (%(default)s)")
    add("--interval", type=number(0.01), help="load interval [s]; else the scenario's own")
    add("--episodes", type=whole_number(1), help="load traces (20, with --trace-seed 1)")
    add("--seed", type=whole_number(0), default=0, help="what the traces follow from (%(default)s)")
    add(
        "--trace-seed",
        type=whole_number(1, MODULUS),
        help="one mcperf trace instead, --episodes times",
    )
    add("--json", type=Path, help="write the figures here")
    add("--plots", type=Path, help="plot each policy's first run into this folder")
    add("--no-regulator", action="store_true", help="let policies act unregulated")
    add("--no-probe", action="store_true", help="give no policy the latency probe it asks for")
    add("--profile", help="fitted parameters instead of the scenario's own")
    add(
        "--spread",
        type=number(0.0),
        default=0.0,
        help="draw each episode's physics from the profile's uncertainty, scaled by this (0)",
    )
    add(
        "--error",
        type=number(0.0),
        default=0.0,
        help="make every parameter wrong by this fraction, up or down at random in each episode",
    )
    add(
        "--stolen",
        type=number(0.0),
        default=0.0,
        help="in this share of the episodes, have spells in which vCPUs are often stolen (0)",
    )
    add(
        "--vm-speed",
        type=number(0.0),
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="draw memcached's speed on the VM from this range (the profile's is 1)",
    )
    for flag, what, limit in (
        ("--least-load", "minimum", "where it is above the maximum, it is the maximum"),
        ("--most-load", "maximum", "at most 1: observations are scaled by the scenario's"),
    ):
        add(
            flag,
            type=number(0.0),
            nargs=2,
            metavar=("LOW", "HIGH"),
            help=f"draw the load's {what} from this range of factors on the scenario's; {limit}",
        )
    add(
        "--family",
        type=whole_number(1),
        metavar="N",
        help="N scenarios drawn from the seed instead",
    )
    add("--arrivals", help="with --family: a trace file whose times of arrival the jobs follow")
    searched = (
        "show how far the best possible is, schedules tried on each trace: %(const)s if not said"
    )
    add("--bound", nargs="?", type=whole_number(1), const=EVALUATIONS, metavar="N", help=searched)
    return line


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Run the evaluation that the command line asks for.

    :param arguments: what `parser` read
    :raises InputError: if something in it is wrong
    """
    if arguments.arrivals is not None:
        raise InputError("--arrivals: goes with --family only")
    scenario = load_scenario(arguments.scenario)
    if arguments.interval is not None:
        scenario = scenario.with_changes(load={"interval_s": arguments.interval})
    policies = [agents.make(name) for name in arguments.policy or default_policies(scenario)]
    for policy in policies:
        policy.reset(scenario)
        agents.warn(policy, scenario)
    profile = load_profile(arguments.profile or scenario.profile)
    if arguments.error >= 1.0:
        raise InputError(f"--error: must be below 1, not {arguments.error:g}")
    if arguments.stolen > 1.0:
        raise InputError(f"--stolen: must be at most 1, not {arguments.stolen:g}")
    variation = Variation(
        physics=arguments.spread,
        error=arguments.error,
        stolen=arguments.stolen,
        vm_speed=range_of("--vm-speed", arguments.vm_speed),
        least_load=range_of("--least-load", arguments.least_load),
        most_load=range_of("--most-load", arguments.most_load, 1.0),
    )
    factory = EpisodeFactory(scenario, profile, variation)
    machine = SimulatedMachine(factory)
    if arguments.trace_seed is None:
        starts = starts_from(arguments.seed, arguments.episodes or 20)
    else:
        starts = repeats_of(arguments.trace_seed, arguments.seed, arguments.episodes or 1)
    regulated = not arguments.no_regulator
    # A drawn physics already holds a part of what measured p95 scatter by.
    scatter = None if variation.physics or variation.error else profile.scatter
    results, expected = [], []
    console = Console(stderr=True)
    for policy in policies:
        runs, p95_us = [], []
        steps = track(
            starts,
            policy.name,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        for index, start in enumerate(steps):
            shown = arguments.plots is not None and index == 0
            recorder = TimelineRecorder(scenario) if shown else IntervalRecorder()
            run = run_episode(machine, policy, start, regulated, recorder, not arguments.no_probe)
            runs.append(run)
            p95_us.append(counted_p95(recorder.intervals, run))
            if isinstance(recorder, TimelineRecorder):
                plot(recorder, policy.name, runs[-1], profile, arguments.plots)
        results.append((policy.name, runs))
        expected.append(expected_violations(p95_us, scenario.service.slo_us, scatter))
    content = report(scenario, profile, results, expected)
    if arguments.bound:
        from training.evaluation.bound import bound_report  # scipy takes its time

        content["bound"] = bound_report(factory, starts, evaluations=arguments.bound)
    return content


def evaluate_family(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Run the evaluation on drawn scenarios that the command line asks for.

    :param arguments: what `parser` read
    :raises InputError: if something in it is wrong
    """
    apart = (
        *("scenario", "interval", "trace_seed", "plots", "no_regulator", "no_probe", "profile"),
        *("spread", "error", "stolen", "vm_speed", "least_load", "most_load"),
    )
    defaults = vars(parser().parse_args([]))
    check_no_others({name: getattr(arguments, name) for name in apart}, defaults)
    return family_report(
        arguments.family,
        arguments.seed,
        arguments.policy or rule_names(),
        arguments.episodes or EPISODES,
        arguments.arrivals or "",
        arguments.bound or 0,
        workers=len(os.sched_getaffinity(0)),
    )


def default_policies(scenario: Scenario) -> list[str]:
    """
    What is compared where no policy is named: the trained policy, if there is one, and references.

    What cannot run the scenario (a network for other actions, a plan for other jobs) is left out
    and named on stderr.

    :param scenario: what they are to run
    :raises InputError: if nothing is left
    """
    fitting = []
    for name in (shipped_for(scenario), *REFERENCES):
        try:
            agents.make(name).reset(scenario)
        except InputError as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            fitting.append(name)
    if not fitting:
        raise InputError(f"scenario {scenario.name}: name a policy that can run it (--policy)")
    return fitting


def range_of(
    option: str, given: Sequence[float] | None, largest: float = math.inf
) -> tuple[float, float] | None:
    """
    The range an option gives.

    :param option: name of the option
    :param given: its two numbers, or None where it was not given
    :param largest: what its second number may be at most
    :raises InputError: if they are no range of positive numbers
    """
    if given is None:
        return None
    low, high = given
    if not 0.0 < low <= high:
        raise InputError(f"{option}: LOW must be above 0 and at most HIGH, not {low:g} {high:g}")
    if high > largest:
        raise InputError(f"{option}: HIGH must be at most {largest:g}, not {high:g}")
    return low, high


def plot(recorder: TimelineRecorder, name: str, run: Run, profile: Profile, folder: Path) -> None:
    """
    Plot one run.

    :param recorder: what was recorded
    :param name: the policy's name
    :param run: its figures
    :param profile: the fitted parameters behind it
    :param folder: folder of the picture
    :raises InputError: if that cannot be written
    """
    from training.evaluation.plots import plot_run  # matplotlib takes its time

    title = (
        f"{name}, seed {run.seed}: makespan {run.makespan_s:.0f} s, "
        f"violations {100 * run.violation_ratio:.1f} % "
        f"(simulated, profile {profile.name} {profile_report(profile)['hash'][:8]})"
    )
    path = folder / f"{name.replace('/', '-')}-{recorder.scenario.name}-{run.seed}.png"
    try:
        plot_run(recorder.recording, recorder.scenario, title, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error


def main(argv: Sequence[str] | None = None) -> None:
    """
    Evaluate from the command line.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    with exit_on_bad_input():
        require_writable(arguments.json)
        if arguments.plots is not None:
            require_folder(arguments.plots)
        if arguments.family is None:
            content = evaluate(arguments)
            show(content)
        else:
            content = evaluate_family(arguments)
            show_family(content)
        if arguments.json is not None:
            write_json(content, arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
