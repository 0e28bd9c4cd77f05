"""
Replay logged runs in the simulator and compare with what was measured.

    python -m training.validate --data DIR --profile cca-2025 --json out.json [--cross-validate]

`training.calibration.replay` says how a run is replayed, `training.calibration.run_parameters` with
which parameters, and `training.calibration.scores` what is compared.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_folder, require_writable, write_json
from env.simulator.profile import Profile, Scatter, load_profile
from training.calibration.logs.course import DEFAULT_SLO_US, JOBS, SLO_US
from training.calibration.logs.run_logs import read_runs
from training.calibration.logs.traces import RunTrace
from training.calibration.replay import Replay, replay
from training.calibration.run_parameters import (
    KnownVms,
    left_out_fit,
    profile_fit,
    scatter_of,
)
from training.calibration.scores import Tally, intervals_of, scatter_around


def validate(
    data: Path,
    profile: Profile,
    cross_validate: bool = False,
    plots: Path | None = None,
    say: Console | None = None,
) -> dict[str, Any]:
    """
    Replay every usable run of a folder and compare.

    :param data: folder of measured tables, which may hold groups never seen before
    :param profile: the physics; says which years, machine and jobs are taken
    :param cross_validate: refit without each group before predicting it
    :param plots: folder for plots, if wanted
    :param say: receives lines of progress; silent if not given
    :return: the figures of `Tally.report`, how measured p95 scatter around simulated ones in these
        runs (fitted without a group before its violations are predicted, if so asked; otherwise
        violations are predicted with the profile's), and what was skipped
    :raises InputError: unusable tables, or no run that the profile can judge
    """
    console = say or Console(quiet=True)
    tables = read_runs(data, profile.job_names, profile.years, profile.server)
    for line in tables.summary():
        console.print(line, markup=False, highlight=False)
    if not tables.runs:
        raise InputError(f"{data}: no usable runs for profile {profile.name}")
    slo_us = SLO_US.get(profile.years[0] if profile.years else 0, DEFAULT_SLO_US)
    vms = KnownVms(tables.runs, slo_us, profile_fit(profile))
    tally = Tally(slo_us)
    overlays: dict[str, tuple[RunTrace, Replay]] = {}
    scatter = profile.scatter
    scatters: dict[str, Scatter] = {}
    for group in dict.fromkeys(run.group for run in tables.runs):
        if cross_validate:
            fit = left_out_fit(data, profile, tables.runs, group)
            vms = KnownVms(tables.runs, slo_us, fit)
            others = [run for run in tables.runs if run.group != group]
            if any(run.moves_logged for run in tables.runs if run.group == group):
                scatter = scatter_of(others, vms, slo_us)
            console.print(f"refitted without {group}", markup=False, highlight=False)
        if scatter is not None:
            scatters[group] = scatter
        for run in tables.runs:
            if run.group != group:
                continue
            own = vms.on_vm(run)
            opened = replay(run, own, closed=False)
            drawn_us = vms.drawn_p95(run) if run.moves_logged else opened.p95_us[None]
            compared = intervals_of(run, opened, drawn_us)
            tally.add(run, compared, opened, replay(run, own, closed=True))
            overlays.setdefault(group, (run, opened))
    report = tally.report(profile.name, scatters)
    scatter = scatter_around(tally.intervals, slo_us)
    report["scatter"] = None if scatter is None else scatter.model_dump()
    report["cross_validated"] = cross_validate
    report["skipped"] = tables.summary()
    if plots is not None:
        draw(plots, tally, overlays)
    return report


def draw(folder: Path, tally: Tally, overlays: Mapping[str, tuple[RunTrace, Replay]]) -> None:
    """
    Plot measured against simulated durations, and the p95 of one run of each group.

    :param folder: folder that receives the pictures
    :param tally: the durations
    :param overlays: by group, one of its runs and its open replay
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    require_folder(folder)
    figure, axes = plt.subplots(figsize=(6, 6))
    for name in JOBS:
        rows = [(row.measured_s, row.open_s) for row in tally.job_rows if row.job == name]
        if rows:
            measured, simulated = zip(*rows, strict=True)
            axes.scatter(measured, simulated, s=12, alpha=0.6, label=name)
    top = max(max(row.measured_s, row.open_s) for row in tally.job_rows)
    axes.plot([0, top], [0, top], color="black", linewidth=0.8)
    axes.set(xlabel="measured duration [s]", ylabel="simulated duration [s]")
    axes.legend(frameon=False)
    figure.savefig(folder / "durations.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    for group, (run, opened) in overlays.items():
        figure, axes = plt.subplots(figsize=(10, 4))
        axes.step(run.interval_start_s, run.p95_us / 1e3, where="post", label="measured")
        axes.step(run.interval_start_s, opened.p95_us / 1e3, where="post", label="simulated")
        axes.axhline(tally.slo_us / 1e3, color="black", linestyle=":", linewidth=0.8)
        axes.set(xlabel="time [s]", ylabel="p95 [ms]", title=run.run)
        axes.set_xlim(run.first_start_s, run.last_end_s)
        axes.legend(frameon=False)
        figure.savefig(folder / f"p95-{group.split('/')[0]}.png", dpi=120, bbox_inches="tight")
        plt.close(figure)


def shown(report: Mapping[str, Any]) -> Iterator[str]:
    """
    The report's figures, a line each.

    :param report: what `validate` made
    """
    jobs, violations = dict(report["job_duration"]), dict(report["violations"])
    kinds, curve = jobs.pop("kinds"), violations.pop("curve")
    missing = violations.pop("auc_missing")
    parts = {
        "without suspicious runs": violations.pop("without_suspicious"),
        **violations.pop("groups"),
        **_by_load(violations.pop("loads")),
    }
    repeated = dict(report["repetition"])
    told = dict(repeated.pop("violations"))
    told_groups = told.pop("groups")
    yield f"job_duration: {jobs}"
    for kind, errors in kinds.items():
        yield f"job_duration, {kind}: {errors}"
    for what in ("makespan", "p95"):
        yield f"{what}: {report[what]}"
    yield f"violations: {violations}"
    for point in curve or ():
        yield (
            f"probability {point['from']:g} to {point['to']:g}: {point['intervals']} intervals, "
            f"{point['expected']} expected to violate, {point['measured']} measured"
        )
    for part, scores in parts.items():
        own = {name: score for name, score in scores.items() if name != "curve"}
        yield f"violations, {part}: {own}"
    for part, lack in (missing or {}).items():
        yield f"lacking to an AUC of 1, {part}: {lack}"
    yield f"repetition: {repeated}"
    for part, scores in {"all": told, **told_groups}.items():
        yield f"repetition, violations, {part}: {scores}"
    yield f"scatter: {report['scatter']}"


def _by_load(loads: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Scores of violations by the range of their load."""
    named = {}
    for scores in loads:
        own = dict(scores)
        low, high = own.pop("from_qps"), own.pop("to_qps")
        named[f"from {low:,.0f} requests/s" + (f" to {high:,.0f}" if high else "")] = own
    return named


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.validate",
        description="Replay logged runs in the simulator's physics and compare.",
    )
    add = line.add_argument
    add("--data", type=Path, required=True, help="folder with runs, intervals and events")
    add("--profile", required=True, help="a profile's name, or the path of its file")
    add("--json", type=Path, required=True, help="report to write")
    add("--cross-validate", action="store_true", help="refit without each group, then predict it")
    add("--plots", type=Path, help="folder for plots")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Validate from the command line.

    :param argv: command line, the process's own if none is given
    """
    given = parser().parse_args(argv)
    console = Console(soft_wrap=True)
    begun = time.monotonic()
    with exit_on_bad_input():
        require_writable(given.json)
        if given.plots is not None:
            require_folder(given.plots)
        profile = load_profile(given.profile)
        report = validate(given.data, profile, given.cross_validate, given.plots, console)
        write_json(report, given.json)
    for line in shown(report):
        console.print(line, markup=False, highlight=False)
    console.print(f"{report['runs']} runs in {time.monotonic() - begun:.1f} s; wrote {given.json}")


if __name__ == "__main__":
    main(sys.argv[1:])
