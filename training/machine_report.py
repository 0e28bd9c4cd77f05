"""What was measured on this machine: the tables, pictures and sentences of its report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from env.scenario import Scenario
from env.simulator.profile import Profile
from training.characterise_report import (
    Section,
    plot_latency,
    plot_normalised,
    plot_queueing,
    plot_speedups,
    write_page,
)
from training.curves import trusted
from training.factorial import analyse, from_table
from training.findings import (
    ALONE,
    SOURCES,
    breaches,
    curves,
    knees,
    normalised,
    queueing,
    safe_jobs,
    speedups,
)
from training.measure import BACKGROUND, EQUAL, MARGIN
from training.queueing import bottleneck

HERE = "here"


def write_report(
    scenario: Scenario,
    profile: Profile,
    latency: pd.DataFrame,
    jobs: pd.DataFrame,
    actuation: pd.DataFrame,
    out: Path,
) -> list[str]:
    """
    Write the derived tables, the pictures and the page.

    :param scenario: what was measured for
    :param profile: what was fitted
    :param latency: see `training.findings`
    :param jobs: see `training.findings`
    :param actuation: see `training.actuation`
    :param out: folder
    :return: the most important findings, a sentence each
    """
    points = curves(latency.assign(source=HERE))
    jobs = jobs.assign(source=HERE)
    slo_us = scenario.service.slo_us
    margin = margins(points)
    found = knees(points, slo_us)
    sections = [_trust(latency, jobs, margin)]
    tables = {"margins": margin, "knees": found}
    section = Section("memcached", tables=[found])
    for (threads, cores), own in points.groupby(["threads", "cores"]):
        name = f"latency-T{threads}C{cores}.png"
        title = f"{threads} threads on {cores} vCPU{'s' * (cores > 1)}"
        plot_latency(own, "beside", slo_us, title, out / name)
        section.pictures.append(name)
    section.lines += _sharing(latency)
    sections.append(section)
    sections += _jobs(points, jobs, slo_us, tables, out)
    analyses = queueing(points)
    section = Section("Queueing models beside memcached alone")
    for analysis in analyses:
        name = f"queueing-{analysis.name.replace(' ', '-')}.png"
        plot_queueing(analysis, out / name)
        section.pictures.append(name)
        section.lines.append(f"{analysis.name}: {analysis.law}.")
        section.lines += [comparison.verdict() for comparison in analysis.comparisons]
        section.tables.append(analysis.rows())
    section.lines += _bottlenecks(latency)
    effects = _effects(latency, section.lines)
    if len(effects):
        tables["factorial"] = effects
        section.tables.append(effects)
    tables["queueing"] = pd.concat([a.rows() for a in analyses]) if analyses else pd.DataFrame()
    sections.append(section)
    sections.append(Section("Changing and reading the machine", tables=[actuation]))
    sections.append(Section("The profile", tables=[_profile_table(profile)]))
    for name, table in tables.items():
        table.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    write_page(f"{scenario.name}: this machine", sections, out / "report.html")
    lines = [line for section in sections for line in section.lines]
    told = [line for line in lines if line.startswith(("beside", "bottleneck"))]
    return [*sections[0].lines, *told]


def margins(points: pd.DataFrame) -> pd.DataFrame:
    """
    How well each point is known.

    :param points: what `training.findings.curves` made
    :return: mean p95 and load, half the width of their 95 % intervals, p95's over its mean, and
        what ran beside got [vCPUs]
    """
    table = points[["threads", "cores", "beside", "target_qps", "n"]].copy()
    for name in ("p95_us", "achieved_qps"):
        table[name] = points[name]
        table[f"{name}_ci"] = points[f"{name}_ci"]
    table["margin"] = points["p95_us_ci"] / points["p95_us"]
    table["beside_cores"] = points["beside_cores"]
    return table


def _trust(latency: pd.DataFrame, jobs: pd.DataFrame, margin: pd.DataFrame) -> Section:
    disturbed = int((latency["disturbed"] > 0).sum())
    known = int((margin["margin"] <= MARGIN).sum())
    lines = [
        f"{disturbed} of {len(latency)} points of load and "
        f"{int((jobs['disturbed'] > 0).sum())} of {len(jobs)} job runs were disturbed by other "
        "processes or a vCPU that stood still; they are used only where nothing better was got.",
        f"p95 is known to {MARGIN:.0%} (half the width of its 95 % interval) at {known} of "
        f"{len(margin)} points; the others stopped at the limit of rounds.",
    ]
    shared = latency[latency["shares_client"] > 0]
    if len(shared):
        names = ", ".join(f"{cores} vCPUs" for cores in sorted(shared["cores"].unique()))
        lines.append(
            f"With {names} memcached shares a vCPU with the load generator, which comes first "
            "there: these points show this machine with its load, not memcached alone."
        )
    return Section("How far to trust this", lines, tables=[margin])


def _sharing(latency: pd.DataFrame) -> list[str]:
    """What work on memcached's own vCPU costs it, and gets."""
    points = curves(latency.assign(source=HERE))
    own = latency.groupby(["threads", "cores", "beside"])
    alone = points[points["beside"] == ALONE].set_index(["threads", "cores", "target_qps"])
    lines = []
    for (threads, cores, beside), rows in own:
        if not beside.endswith((f"({BACKGROUND})", f"({EQUAL})")):
            continue
        curve = points[
            (points["threads"] == threads)
            & (points["cores"] == cores)
            & (points["beside"] == beside)
        ].set_index(["threads", "cores", "target_qps"])
        both = curve.join(alone.add_suffix("_alone"), how="inner")
        if both.empty:
            continue
        calm = both[both["achieved_qps_alone"] >= 0.97 * both.index.get_level_values(2)]
        ratio = (calm["p95_us"] / calm["p95_us_alone"]).median()
        most = both["achieved_qps"].max() / both["achieved_qps_alone"].max()
        got = rows.groupby("target_qps")["beside_cores"].median()
        lines.append(
            f"beside {beside}, T{threads}C{cores}: p95 {ratio:.2f} times that alone (median over "
            f"the loads served alone), largest throughput {most:.2f} times that alone; it got "
            f"{got.iloc[0]:.0%} of a vCPU at the smallest load, {got.iloc[-1]:.0%} at the largest."
        )
    return lines


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
        lines.append(f"bottleneck with {threads} threads on {cores} vCPUs: {bottleneck(use)}.")
    return lines


def _effects(latency: pd.DataFrame, lines: list[str]) -> pd.DataFrame:
    """2^2 r analysis of memcached's threads and vCPUs on its throughput at saturation."""
    alone = latency[latency["beside"] == ALONE]
    top = alone.groupby(["threads", "cores"])["target_qps"].transform("max")
    full = trusted(alone[alone["target_qps"] == top], ["threads", "cores"])
    factors = ["threads", "cores"]
    try:
        result = analyse(factors, from_table(full, factors, "achieved_qps"))
    except ValueError:  # not every combination was measured twice
        return pd.DataFrame()
    lines.append("Threads and vCPUs on throughput past saturation [1/s], as a 2^2 r experiment:")
    lines += result.checks()
    rows = [(e.name, e.value, e.low, e.high, e.share) for e in result.effects]
    rows.append(("errors", np.nan, np.nan, np.nan, result.error_share))
    return pd.DataFrame(rows, columns=["effect of", "value", "low", "high", "of variation"])


def _jobs(
    points: pd.DataFrame,
    jobs: pd.DataFrame,
    slo_us: float,
    tables: dict[str, pd.DataFrame],
    out: Path,
) -> list[Section]:
    section = Section("Jobs", tables=[jobs.drop(columns=["what", "source"])])
    scaling = speedups(jobs)
    if len(scaling):
        tables["speedups"] = scaling
        plot_speedups(scaling, "alone, the load stopped", out / "speedups.png")
        section.pictures.append("speedups.png")
    table = normalised(jobs)
    if table.empty:
        return [section]
    tables["normalised"] = table.reset_index()
    plot_normalised(table, "time normalised to alone", out / "normalised.png")
    section.pictures.append("normalised.png")
    names = {f"{source} ({EQUAL})": source for source in SOURCES}
    pressed = points.replace({"beside": names})
    loads = sorted(pressed["target_qps"].unique())
    middle = [load for load in loads if load <= np.median(loads)][-1:]
    broken = breaches(pressed[pressed["beside"].isin(SOURCES)], middle, slo_us)
    breaking = sorted(set(broken.loc[broken["breaks"], "beside"]))
    tables["breaches"] = broken
    ranked = ", ".join(f"{job} {value:.2f}" for job, value in safe_jobs(table, breaking))
    section.lines.append(
        f"Over the SLO at {middle[0]:,.0f}/s: {', '.join(breaking) or 'no source'}. Worst time of "
        f"each job under those, the safest beside memcached first: {ranked or 'none measured'}."
    )
    return [section]


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
