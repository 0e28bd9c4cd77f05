"""What was measured on this machine: the tables, pictures and sentences of its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from env.scenario import Scenario
from env.simulator.profile import Profile
from training.analysis.curves import trusted
from training.analysis.effects import Factorial, analyse, from_table
from training.analysis.findings import (
    ALONE,
    SOURCES,
    breaches,
    curves,
    job_times,
    knees,
    normalised,
    queueing,
    safe_jobs,
    speedups,
)
from training.analysis.queueing import SATURATED, bottleneck
from training.analysis.report_page import (
    PANELS,
    Section,
    plot_latency,
    plot_normalised,
    plot_queueing,
    plot_speedups,
    write_page,
)
from training.measuring.experiment import Factor
from training.measuring.pressure import BACKGROUND, EQUAL
from training.measuring.samples import MARGIN, SERVING
from training.refinement.rehearsal import Verdict

HERE = "here"
RULES = (
    "Saturation: the median of the three largest throughputs of a sweep that asked for more. Knee: "
    "the load at which p95 has gone half-way, in logarithms, from its level at a quarter of the "
    "largest load to its plateau, the median of the last four points."
)
CURVE = ["threads", "cores", "beside"]


@dataclass(frozen=True)
class Measured:
    """
    The tables of a characterisation.

    :param latency: see `training.analysis.findings`
    :param jobs: see `training.analysis.findings`
    :param actuation: see `training.measuring.actuation`
    :param factorial: like `latency`, a row for each run of the 2^k r experiment; may be empty
    :param factors: what that experiment varied
    :param verdicts: what a rehearsal says of the profile
    """

    latency: pd.DataFrame
    jobs: pd.DataFrame
    actuation: pd.DataFrame
    factorial: pd.DataFrame
    factors: tuple[Factor, ...] = ()
    verdicts: Sequence[Verdict] = ()


def write_report(
    scenario: Scenario, profile: Profile, measured: Measured, out: Path
) -> tuple[list[str], pd.DataFrame]:
    """
    Write the derived tables, the pictures and the page.

    :param scenario: its SLO and memcached's threads are what findings refer to
    :param profile: what was fitted
    :param measured: what it was fitted to
    :param out: folder
    :return: the most important findings, a sentence each; and how well everything is known, a row
        each curve or job
    """
    latency = measured.latency.assign(source=HERE)
    points = curves(latency)
    times = job_times(measured.jobs.assign(source=HERE)).drop(columns="source")
    margin = margins(points)
    summary = summarise(margin, times)
    slo_us = scenario.service.slo_us
    found = knees(points, slo_us).drop(columns="source")
    tables = {"margins": margin, "margins-summary": summary, "knees": found, "job-times": times}
    before = "What the profile was good enough for, before it learned from its rehearsal"
    good_for = Section(before, list(map(str, measured.verdicts)))
    sections = [_trust(measured, margin, times, summary), good_for]
    section = Section("memcached", [RULES], tables=[found])
    for (threads, cores), own in points.groupby(["threads", "cores"]):
        name = f"latency-T{threads}C{cores}.png"
        title = f"{threads} threads on {cores} vCPU{'s' * (cores > 1)}"
        plot_latency(own, "beside", slo_us, title, out / name, PANELS)
        section.pictures.append(name)
    section.lines += _sharing(points)
    sections.append(section)
    sections.append(_jobs(scenario, profile, points, measured.jobs, times, tables, out))
    sections.append(_queueing(latency, points, tables, out))
    if len(measured.factorial):
        sections.append(_experiment(measured, tables))
    sections.append(_actuation(measured.actuation))
    sections.append(Section("The profile", tables=[_profile_table(profile)]))
    sections.append(Section("Every point", tables=[margin, times]))
    for name, table in tables.items():
        table.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    write_page(f"{scenario.name}: this machine", sections, out / "report.html")
    lines = [line for section in sections[1:] for line in section.lines]
    told = [line for line in lines if line.startswith(("beside", "over the SLO", "bottleneck"))]
    known = _known_jobs(profile, measured.jobs)
    return [*sections[0].lines, *told, *known, *good_for.lines], summary


def margins(points: pd.DataFrame) -> pd.DataFrame:
    """
    How well each point is known.

    :param points: what `training.analysis.findings.curves` made
    :return: means with half the width of their 95 % intervals, p95's over its mean (`margin`), and
        what ran beside got [vCPUs]
    """
    table = points[[*CURVE, "target_qps", "n"]].copy()
    for name in ("achieved_qps", "p95_us", "p99_us", "p50_us", "cpu_util_pct"):
        if name in points:
            table[name] = points[name]
            table[f"{name}_ci"] = points[f"{name}_ci"]
    table["margin"] = points["p95_us_ci"] / points["p95_us"]
    table["beside_cores"] = points["beside_cores"]
    return table


def summarise(margin: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """
    The margins of each curve, and of each job's times.

    :param margin: what `margins` made
    :param times: what `training.analysis.findings.job_times` made
    :return: measured, points, rounds (fewest), median and worst margin, and how many are known
    """
    groups = [
        (f"memcached T{threads}C{cores} {_beside(beside)}, p95", rows)
        for (threads, cores, beside), rows in margin.groupby(CURVE, sort=False)
    ]
    for job, rows in times.groupby("job"):
        alone = rows["beside"] == ALONE
        groups += [(f"{job} alone", rows[alone]), (f"{job} beside something", rows[~alone])]
    return pd.DataFrame(
        {
            "measured": name,
            "points": len(rows),
            "rounds": int(rows["n"].min()),
            "median margin": rows["margin"].median(),
            "worst margin": rows["margin"].max(),
            f"within {MARGIN:.0%}": int((rows["margin"] <= MARGIN).sum()),
        }
        for name, rows in groups
        if len(rows)
    )


def _beside(beside: str) -> str:
    return "alone" if beside == ALONE else f"beside {beside}"


def _trust(
    measured: Measured, margin: pd.DataFrame, times: pd.DataFrame, summary: pd.DataFrame
) -> Section:
    latency, jobs = measured.latency, measured.jobs
    disturbed = int((latency["disturbed"] > 0).sum())
    known = int((margin["margin"] <= MARGIN).sum())
    known_times = int((times["margin"] <= MARGIN).sum())
    lines = [
        f"{disturbed} of {len(latency)} points of load and "
        f"{int((jobs['disturbed'] > 0).sum())} of {len(jobs)} job runs were disturbed by other "
        "processes or a vCPU that stood still; they are used only where nothing better was got.",
        f"p95 is known to {MARGIN:.0%} (half the width of its 95 % interval) at {known} of "
        f"{len(margin)} points (median {_percent(margin['margin'])}), a job's time in "
        f"{known_times} of {len(times)} cases (median {_percent(times['margin'])}); the others "
        "stopped at the limit of rounds or of time.",
    ]
    shared = latency[latency["shares_client"] > 0]
    if len(shared):
        names = ", ".join(f"{cores} vCPUs" for cores in sorted(shared["cores"].unique()))
        lines.append(
            f"With {names} memcached shares a vCPU with the load generator, which comes first "
            "there: these points show this machine with its load, not memcached alone."
        )
    tables = [summary] if summary["median margin"].notna().any() else []
    return Section("How far to trust this", lines, tables=tables)


def _percent(margins: pd.Series) -> str:
    return (
        f"{margins.median():.1%}" if margins.notna().any() else "not known: none was measured twice"
    )


def _sharing(points: pd.DataFrame) -> list[str]:
    """What work on memcached's own vCPU costs it, and gets."""
    by = ["threads", "cores", "target_qps"]
    alone = points[points["beside"] == ALONE].set_index(by)
    lines = []
    for (threads, cores, beside), rows in points.groupby(CURVE):
        if not beside.endswith((f"({BACKGROUND})", f"({EQUAL})")):
            continue
        both = rows.set_index(by).join(alone.add_suffix("_alone"), how="inner")
        if both.empty:
            continue
        calm = both[both["achieved_qps_alone"] >= SATURATED * both.index.get_level_values(2)]
        p95, p99 = ((calm[q] / calm[f"{q}_alone"]).median() for q in ("p95_us", "p99_us"))
        most = both["achieved_qps"].max() / both["achieved_qps_alone"].max()
        got = both["beside_cores"]
        lines.append(
            f"beside {beside}, T{threads}C{cores}: p95 {p95:.2f} and p99 {p99:.2f} times those "
            f"alone (medians over the loads served alone), largest throughput {most:.2f} times "
            f"that alone; it got {got.iloc[0]:.0%} of a vCPU at the smallest load, "
            f"{got.iloc[-1]:.0%} at the largest."
        )
    return lines


def _queueing(
    latency: pd.DataFrame, points: pd.DataFrame, tables: dict[str, pd.DataFrame], out: Path
) -> Section:
    section = Section("Queueing models beside memcached alone")
    analyses = queueing(points)
    for analysis in analyses:
        name = f"queueing-{analysis.name.replace(' ', '-')}.png"
        plot_queueing(analysis, out / name)
        section.pictures.append(name)
        section.lines.append(f"{analysis.name}: {analysis.law}.")
        section.lines += [comparison.verdict() for comparison in analysis.comparisons]
        section.tables.append(analysis.rows())
    section.lines += _bottlenecks(latency)
    tables["queueing"] = pd.concat([a.rows() for a in analyses]) if analyses else pd.DataFrame()
    return section


def _bottlenecks(latency: pd.DataFrame) -> list[str]:
    lines = []
    alone = latency[latency["beside"] == ALONE]
    for (threads, cores), rows in alone.groupby(["threads", "cores"]):
        top = rows[rows["target_qps"] == rows["target_qps"].max()]
        servers = min(threads, cores)
        use = {
            "memcached's vCPUs": float(top["cpu_util_pct"].median()) / 100.0 / servers,
            "the load generator": float(top["client_cores"].median()),
        }
        lines.append(f"bottleneck of T{threads}C{cores}: {bottleneck(use)}.")
    return lines


def _experiment(measured: Measured, tables: dict[str, pd.DataFrame]) -> Section:
    """The 2^k r analysis: throughput past saturation, and p95 at a load that is served."""
    section = Section("What the factors matter")
    factors = [factor.name for factor in measured.factors]
    loads = sorted(measured.factorial["target_qps"].unique())
    levels = ", ".join(map(str, measured.factors))
    for load, response, what in (
        (loads[-1], "achieved_qps", "throughput [1/s] past saturation"),
        (loads[0], "p95_us", "p95 [us]"),
    ):
        runs = measured.factorial[measured.factorial["target_qps"] == load]
        table = trusted(runs, factors, least=2).reset_index(drop=True)
        disturbed = int((table["disturbed"] > 0).sum())
        title = f"{what}, {load:,.0f}/s asked for, {levels}"
        try:
            result = analyse(factors, from_table(table, factors, response))
        except ValueError as error:  # not every combination was measured twice
            section.lines.append(f"{title}: cannot be analysed: {error}.")
            continue
        _, r = result.responses.shape
        among = f", {disturbed} of these runs disturbed" if disturbed else ""
        section.lines.append(f"{title}, {r} rounds each{among}: {_verdict(result)}")
        section.lines += result.checks()
        effects = _effects(result)
        tables[f"effects-{response.removesuffix('_us').removesuffix('_qps')}"] = effects
        section.tables.append(effects)
    return section


def _verdict(result: Factorial) -> str:
    """What matters most, in a sentence."""
    real = [effect for effect in result.effects[1:] if effect.significant]
    ranked = sorted(real, key=lambda effect: -effect.share)
    named = ", ".join(
        f"{effect.name} {effect.share:.0%} (effect {effect.value:+,.4g})" for effect in ranked
    )
    return (
        f"of the variation {named or 'nothing that is significant'}; "
        f"repetitions {result.error_share:.0%}."
    )


def _effects(result: Factorial) -> pd.DataFrame:
    columns = ["effect of", "signs", "value", "low", "high", "of variation"]
    rows: list[Sequence[object]] = [
        (
            effect.name,
            "".join("+" if sign > 0 else "-" for sign in effect.signs),
            *(effect.value, effect.low, effect.high, effect.share),
        )
        for effect in result.effects
    ]
    rows.append(("errors", "", np.nan, np.nan, np.nan, result.error_share))
    return pd.DataFrame(rows, columns=columns)


def _known_jobs(profile: Profile, jobs: pd.DataFrame) -> list[str]:
    """How each job was measured, and how well it is known."""
    lines = []
    for name, traits in profile.jobs.items():
        own = jobs[jobs["job"] == name]
        ended, work = own["real_s"].notna(), traits["work_s"]
        how = f"{ended.sum()} runs, " if ended.any() else ""
        if ended.any():
            part = float(own["sampled"].max())  # under load a part of that will do
            how += "whole" if part == 1.0 else f"of {part:.2g} of it each"
        if not ended.all():
            how += f"; {(~ended).sum()} stopped" if how else "none has ended"
        cost = own["cycles"] / own["instructions"]
        by = [
            f"{cost[own['beside'] == beside].median():.2f} {said}"
            for beside, said in ((ALONE, "alone"), (SERVING, "beside memcached"))
            if cost[own["beside"] == beside].notna().any()
        ]
        counted = f"cycles per instruction {', '.join(by)}" if by else "CPU time, no cycles counted"
        lines.append(
            f"job {name}: {work.value:.3g} s of work, known to {work.spread:.0%} ({work.source}); "
            f"{how or 'not run'}; {counted}."
        )
    return lines


def _jobs(
    scenario: Scenario,
    profile: Profile,
    points: pd.DataFrame,
    jobs: pd.DataFrame,
    times: pd.DataFrame,
    tables: dict[str, pd.DataFrame],
    out: Path,
) -> Section:
    section = Section(
        "Jobs",
        _known_jobs(profile, jobs),
        tables=[times[times["beside"] == ALONE].drop(columns="ratio_ci")],
    )
    calm = trusted(jobs, ["job", "threads", "beside"])
    # Rounds stand for sources of data: a speed-up for each of them.
    scaling = speedups(calm.assign(source=calm["rep"]))
    if len(scaling):
        tables["speedups"] = scaling
        plot_speedups(scaling, "alone, the load stopped; 95 % intervals", out / "speedups.png")
        section.pictures.append("speedups.png")
    table = normalised(calm.assign(source=HERE))
    if table.empty:
        return section
    tables["normalised"] = table.reset_index()
    plot_normalised(table, "time normalised to alone", out / "normalised.png")
    section.pictures.append("normalised.png")
    pressed = points[(points["threads"] == scenario.service.threads) & (points["cores"] == 1)]
    pressed = pressed.replace({"beside": {f"{source} ({EQUAL})": source for source in SOURCES}})
    pressed = pressed[pressed["beside"].isin(SOURCES)]
    load = _served_alone(scenario, points)
    broken = breaches(pressed, [load], scenario.service.slo_us)
    breaking = sorted(set(broken.loc[broken["breaks"], "beside"]))
    tables["breaches"] = broken.drop(columns="source")
    ranked = ", ".join(f"{job} {value:.2f}" for job, value in safe_jobs(table, breaking))
    section.lines.append(
        f"over the SLO of {scenario.service.slo_us:,.0f} us at {load:,.0f}/s: "
        f"{', '.join(breaking) or 'no source'}. Worst time of each job under those, the safest "
        f"beside memcached first: {ranked or 'none measured'}."
    )
    section.tables.append(tables["breaches"])
    return section


def _served_alone(scenario: Scenario, points: pd.DataFrame) -> float:
    """The largest measured load that memcached alone serves within the SLO on one vCPU."""
    alone = points[(points["threads"] == scenario.service.threads) & (points["cores"] == 1)]
    alone = alone[alone["beside"] == ALONE]
    broken = breaches(alone, alone["target_qps"].tolist(), scenario.service.slo_us)
    served = broken.loc[~broken["breaks"], "target_qps"]
    return float(served.max() if len(served) else alone["target_qps"].min())


def _actuation(actuation: pd.DataFrame) -> Section:
    section = Section("Changing and reading the machine")
    missing = actuation["n"] == 0
    section.lines += [
        f"{row.of}: {row.action}." for row in actuation[missing].itertuples(index=False)
    ]
    hiccups = actuation["of"] == "hiccups"
    section.lines += [
        f"{row.action}: {row.seen:g} in {row.watched_s:.0f} s of steady load"
        + (f", {1000.0 * row.mean_s:.0f} ms long on average." if row.seen else ".")
        for row in actuation[hiccups].itertuples(index=False)
    ]
    columns = ["of", "action", "median_s", "p90_s", "p99_s", "n"]
    section.tables.append(actuation.loc[~missing & ~hiccups, columns])
    return section


def _profile_table(profile: Profile) -> pd.DataFrame:
    rows = [
        (f"service.{name}", p.value, p.spread, p.unit, p.source)
        for name, p in profile.service.items()
    ]
    rows += [
        (f"jobs.{job}.{name}", p.value, p.spread, p.unit, p.source)
        for job, fields in profile.jobs.items()
        for name, p in fields.items()
    ]
    rows += [
        (f"host.{name}", p.value, p.spread, p.unit, p.source) for name, p in profile.host.items()
    ]
    return pd.DataFrame(rows, columns=["parameter", "value", "spread of ln", "unit", "source"])
