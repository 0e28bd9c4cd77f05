"""
What PPO adds to a network for any scenario. The experiment behind docs/general.md.

Runs of `train.py` with a recipe for any scenario are compared on drawn report scenarios, all on the
same load traces and random numbers. A run's `fitted.zip` is the network before PPO and `best.zip`
after it; a run without `fitted.zip` is taken for one from random weights. Runs that went on from
another (`train.py --resume`) have none, either, and do not belong here.

    train.py --recipe general --steps 330000 --seeds 5 --workers 2 --out runs/fitted
    train.py --recipe scratch.yaml --steps 330000 --seeds 5 --workers 2 --out runs/scratch
    python -m benchmarks.ppo_part runs/fitted/? runs/scratch/? --json ppo.json --plot curves.png

`scratch.yaml` is a copy of the recipe without its section `prices`.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agents.general_checkpoint import read_general_checkpoint
from env.errors import InputError, exit_on_bad_input
from env.family.arrivals import read_trace
from env.family.drawing import drawn_names
from env.inputs.commandline import OneLineParser, require_writable, whole_number, write_json
from training.analysis.palette import PALETTE
from training.evaluation.episodes import Run
from training.evaluation.family_comparison import (
    EPISODES,
    FamilyCell,
    counted_s,
    geometric_mean,
    mean_violations,
    measured_cells,
    scenario_of_cell,
)
from training.statistics import mean_and_ci95

FITTED, AFTER, SCRATCH = "fitted", "fitted, then PPO", "PPO from random weights"

CURVE = "selection/over_baseline"
"""TensorBoard's name of the time over a good list's on the selection scenarios."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Trained:
    """
    A network of a run.

    :param run: the run's folder
    :param stage: `FITTED`, `AFTER` or `SCRATCH`
    """

    run: Path
    stage: str

    @property
    def checkpoint(self) -> Path:
        """Its file."""
        return self.run / ("fitted.zip" if self.stage == FITTED else "best.zip")


@dataclass(frozen=True)
class Played:
    """
    How a network did on S scenarios.

    :param seconds: float64[S], see `counted_s`; NaN where a job was not done
    :param violations: float64[S], mean share of the intervals
    """

    seconds: FloatArray
    violations: FloatArray

    @property
    def undone(self) -> int:
        """In how many scenarios a job was not done."""
        return int(np.isnan(self.seconds).sum())


def networks_of(runs: Sequence[Path]) -> list[Trained]:
    """
    The networks of some runs.

    :param runs: their folders
    :raises InputError: if one has no checkpoint for any scenario, or none a fitted network
    """
    found = []
    for run in runs:
        fitted = (run / "fitted.zip").exists()
        found += [Trained(run, FITTED), Trained(run, AFTER)] if fitted else [Trained(run, SCRATCH)]
    for one in found:
        read_general_checkpoint(one.checkpoint)
    if all(one.stage == SCRATCH for one in found):
        raise InputError("runs: none has fitted.zip, and others are compared with those that have")
    return found


def played_of(runs: Sequence[Sequence[Run]], arrivals: Sequence[bool]) -> Played:
    """
    How a network did.

    :param runs: of each scenario those on its traces
    :param arrivals: in which of the scenarios jobs arrive
    """
    seconds = [
        counted_s(of, arrive) if all(run.completed for run in of) else np.nan
        for of, arrive in zip(runs, arrivals, strict=True)
    ]
    return Played(np.array(seconds), np.array([mean_violations(of) for of in runs]))


def against(one: Played, other: Played, arrive: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """
    A network against another, scenario by scenario.

    :param one: how it did
    :param other: how the other did
    :param arrive: bool[S], in which scenarios jobs arrive
    :return: `makespan` and `jct`, ratios where both were done with everything; `violations`, the
        difference of the shares of violated intervals; `undone`, in how many scenarios the one and
        the other left a job
    """
    ratios = one.seconds / other.seconds
    kinds = {"makespan": ~arrive, "jct": arrive}
    return {
        name: geometric_mean(ratios[rows & np.isfinite(ratios)].tolist())
        for name, rows in kinds.items()
    } | {
        "violations": _mean((one.violations - other.violations).tolist()),
        "undone": [one.undone, other.undone],
    }


def mean_of(some: Sequence[Played]) -> Played:
    """
    What several networks did, scenario by scenario: geometric means of times, means of violations.

    :param some: at least one; a scenario counts where all of them were done with everything
    """
    return Played(
        np.exp(np.mean([np.log(one.seconds) for one in some], axis=0)),
        np.mean([one.violations for one in some], axis=0),
    )


def over_runs(compared: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """
    What comparisons of several runs come to, with intervals over the runs.

    :param compared: one a run, see `against`, whose intervals are over the scenarios
    """
    return {
        name: geometric_mean([one[name]["geomean"] for one in compared])
        for name in ("makespan", "jct")
        if all(one[name]["geomean"] for one in compared)
    } | {"violations": _mean([one["violations"]["mean"] for one in compared])}


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    """A mean and half its 95 % interval, ready for JSON."""
    mean, half = mean_and_ci95(values)
    return {"mean": mean, "ci95_half": half}


def report(played: dict[Trained, Played], arrive: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """
    What PPO adds to each fitted network, and how networks from random weights compare.

    :param played: how each network did
    :param arrive: bool[S], in which scenarios jobs arrive
    :return: for `AFTER` and `SCRATCH`, as far as there are any, `runs` and what they come to
        together. Networks after PPO are compared with themselves before it, those from random
        weights with all fitted ones together
    """
    fitted = {network.run: of for network, of in played.items() if network.stage == FITTED}
    found: dict[str, Any] = {}
    for stage in (AFTER, SCRATCH):
        compared = {}
        for network, of in played.items():
            if network.stage == stage:
                before = fitted.get(network.run) or mean_of(list(fitted.values()))
                compared[str(network.run)] = against(of, before, arrive)
        if compared:
            found[stage] = over_runs(list(compared.values())) | {"runs": compared}
    return found


def curve(run: Path) -> dict[str, list[float]]:
    """
    How a run's selection went: lists that were tried, and time over a good list's then.

    :param run: its folder
    """
    folder = run / "tensorboard"
    events = EventAccumulator(str(folder))
    if folder.is_dir():
        events.Reload()
    points = events.Scalars(CURVE) if CURVE in events.Tags()["scalars"] else []
    return {
        "lists": [float(point.step) for point in points],
        "over_baseline": [float(point.value) for point in points],
    }


def draw_curves(curves: dict[Trained, dict[str, list[float]]], path: Path) -> None:
    """
    The learning curves of all runs.

    :param curves: of each run's last network, see `curve`
    :param path: the picture to write (.png)
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for stage, colour in ((AFTER, PALETTE[4]), (SCRATCH, PALETTE[5])):
        runs = [points for network, points in curves.items() if network.stage == stage]
        for number, points in enumerate(runs):
            label = stage if number == 0 else None
            axes.plot(points["lists"], points["over_baseline"], ".-", color=colour, label=label)
    axes.set_xlabel("lists tried by PPO")
    axes.set_ylabel("time over a good list's")
    axes.set_title("Selection scenarios, simulated; a line a seed")
    axes.legend()
    figure.savefig(path, dpi=110)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """
    What was found, in words.

    :param found: see `report`
    """
    for stage, of in found.items():
        what = "themselves before it" if stage == AFTER else "all fitted networks"
        yield f"SIMULATED: {stage}, over {what}"
        for run, compared in of["runs"].items():
            one, other = compared["undone"]
            left = f", left jobs in {one} of the scenarios ({other} before)"
            yield f"  {run}: {_words(compared)}{left if one or other else ''}"
        if len(of["runs"]) > 1:
            yield f"  {len(of['runs'])} runs, intervals over the runs: {_words(of)}"


def _words(compared: dict[str, Any]) -> str:
    """A comparison with its 95 % intervals."""
    said = []
    for name in ("makespan", "jct"):
        ratio = compared.get(name)
        if ratio and ratio["geomean"]:
            bounds = ratio["ci95"]
            interval = f" ({bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else ""
            said.append(f"{name} {ratio['geomean']:.3f}{interval}")
    points, half = compared["violations"]["mean"], compared["violations"]["ci95_half"]
    margin = "" if half is None else f" +- {100 * half:.2f}"
    return ", ".join([*said, f"violated {100 * points:+.2f}{margin} points"])


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(prog="python -m benchmarks.ppo_part", description=__doc__.splitlines()[1])
    add = line.add_argument
    add("runs", nargs="+", type=Path, help="folders of runs")
    add("--family", type=whole_number(1), default=200, help="scenarios drawn (%(default)s)")
    add("--seed", type=whole_number(0), default=1, help="what they follow from (%(default)s)")
    add("--arrivals", default="", help="a trace file whose times of arrival the jobs follow")
    add("--json", type=Path, help="write the figures here")
    add("--plot", type=Path, help="draw the learning curves there (.png)")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Compare, and write what came out.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    with exit_on_bad_input():
        require_writable(arguments.json)
        require_writable(arguments.plot)
        if arguments.arrivals:
            read_trace(arguments.arrivals)
        networks = networks_of(arguments.runs)
        names = tuple(str(network.checkpoint) for network in networks)
        cells = [
            FamilyCell(name, names, arguments.seed, EPISODES, arguments.arrivals)
            for name in drawn_names("report", arguments.seed, arguments.family)
        ]
        arrivals = [scenario_of_cell(cell).has_arrivals for cell in cells]
        measured = [of.runs for of in measured_cells(cells, len(os.sched_getaffinity(0)))]
        played = {
            network: played_of([runs[index] for runs in measured], arrivals)
            for index, network in enumerate(networks)
        }
        found = report(played, np.array(arrivals))
        print("\n".join(lines(found)))
        last = [network for network in networks if network.stage != FITTED]
        curves = {network: curve(network.run) for network in last}
        if arguments.plot:
            draw_curves(curves, arguments.plot)
        if arguments.json:
            of_runs = {str(network.run): points for network, points in curves.items()}
            on = {name: getattr(arguments, name) for name in ("family", "seed", "arrivals")}
            write_json(on | {"stages": found, "curves": of_runs}, arguments.json)


if __name__ == "__main__":
    main()
