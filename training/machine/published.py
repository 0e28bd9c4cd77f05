"""
The public measurements as the tidy tables of `training.analysis.findings`, and what they say.

    python -m training.characterise --data DIR --out DIR

The folder is the one `training.calibrate` reads: `latency_curves`, `memcached_interference`,
`job_scaling`, `job_interference`, `job_pairs`. What the tables' own notes call wrong is left out by
name here, and every line left out is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from env.inputs.commandline import require_folder
from training.analysis.findings import (
    ALONE,
    breaches,
    curves,
    knees,
    normalised,
    queueing,
    safe_jobs,
    speedups,
)
from training.analysis.report_page import (
    Section,
    plot_latency,
    plot_normalised,
    plot_queueing,
    plot_speedups,
    write_page,
)
from training.calibration.logs.known_faults import known_faults
from training.calibration.logs.tables import NAMELESS, nameless, numbers, read_table

REPORT = "2025 Soufiane-Barrada/CCA"
"""
The source that the reference report (group 031) is about.

The `REPORT_` figures are what it concludes: its Part 1 knees [QPS], the sources that break 2 ms at
40K QPS, and the job that is safe beside memcached.
"""

REPORT_KNEES = {
    ALONE: 70e3,
    "cpu": 35e3,
    "l1d": 55e3,
    "l1i": 35e3,
    "l2": 50e3,
    "llc": 40e3,
    "membw": 65e3,
}
REPORT_BREAKING = ("cpu", "l1i")
REPORT_SAFE = "radix"
REPORT_SLO_US = 2000.0
REPORT_LOADS = (35e3, 40e3)
REPORT_STATED_LOAD = 40e3  # the one it has a sentence on
REPORT_STEP_QPS = 5e3  # between the loads of its scans


@dataclass(frozen=True)
class Published:
    """
    Public measurements.

    :param scans: memcached alone by threads and cores, as a latency table
    :param interference: memcached under each source, as a latency table
    :param jobs: jobs under each source, as a jobs table
    :param scaling: jobs alone by threads, as a jobs table
    :param pairs: two jobs together, as a jobs table (`beside` is the other job)
    :param remarks: what was left out, and why
    """

    scans: pd.DataFrame
    interference: pd.DataFrame
    jobs: pd.DataFrame
    scaling: pd.DataFrame
    pairs: pd.DataFrame
    remarks: tuple[str, ...]


def read(folder: Path) -> Published:
    """
    Read the public tables.

    :param folder: folder of the public tables
    :raises InputError: if a table is missing or has no rows
    """
    scans = read_table(folder, "latency_curves")
    interference = read_table(folder, "memcached_interference")
    jobs = read_table(folder, "job_interference")
    scaling = read_table(folder, "job_scaling")
    pairs = read_table(folder, "job_pairs")
    faults = known_faults()
    remarks = []
    of_nobody = nameless(scans)
    if of_nobody.any():
        remarks.append(f"latency_curves: {of_nobody.sum()} left out: {NAMELESS}")
        scans = scans[~of_nobody]
    for scan in faults.scans_left_out:
        hit = scan.rows(scans)
        if hit.any():
            remarks.append(
                f"latency_curves: {scan.repo} T{scan.threads}C{scan.cores} left out: {scan.reason}"
            )
        scans = scans[~hit]
    tables = {"job_interference": jobs, "memcached_interference": interference}
    for fault in faults.interference_left_out:
        table = tables[fault.table]
        tables[fault.table] = table[table["repo"] != fault.repo]
        remarks.append(f"{fault.table}: {fault.repo} left out: {fault.reason}")
    vms = [
        faults.scan_vm(repo, path) for repo, path in zip(scans["repo"], scans["path"], strict=True)
    ]
    return Published(
        _latency(scans.assign(interference=ALONE, repo=vms)),
        _latency(tables["memcached_interference"].assign(threads=1, cores=1)),
        _jobs(tables["job_interference"].assign(threads=1)),
        _jobs(scaling.assign(interference=ALONE)),
        _jobs(
            pairs.rename(columns={"colocated_with(no=alone)": "interference", "time_s": "real_s"})
            .replace({"interference": {"no": ALONE}})
            .assign(threads=1, year=0)
        ),
        tuple(remarks),
    )


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """Name each row's source by year and repository."""
    year = numbers(table["year"]).fillna(0).astype(int).astype(str)
    return table.assign(source=year + " " + table["repo"], beside=table["interference"])


def _latency(table: pd.DataFrame) -> pd.DataFrame:
    columns = ["source", "threads", "cores", "beside", "rep", "target_qps", "achieved_qps"]
    columns += ["avg_us", "p50_us", "p95_us", "p99_us", "cpu_util_pct"]
    named = _named(table).reindex(columns=columns)
    for name in columns[5:]:
        named[name] = numbers(named[name])
    # Loads are asked for in steps of 1000 or more; some logs print them with a fraction.
    named["target_qps"] = named["target_qps"].round(-3)
    return named


def _jobs(table: pd.DataFrame) -> pd.DataFrame:
    named = _named(table)[["source", "job", "threads", "beside", "real_s"]]
    return named.assign(threads=numbers(named["threads"]), real_s=numbers(named["real_s"]))


def conclude(data: Published) -> pd.DataFrame:
    """
    The reference report's conclusions beside what the same rules find in its measurements.

    :param data: what `read` read
    :return: conclusion, published, found, agrees (None where the report says nothing)
    """
    points = curves(data.interference)
    own = points[points["source"] == REPORT]
    found = knees(own, REPORT_SLO_US).set_index("beside")["knee_qps"]
    rows: list[tuple[str, object, object, object]] = []
    for beside, published in REPORT_KNEES.items():
        # The report names the last load of its scan before the bend.
        knee = float(found.get(beside, np.nan))
        last_calm = float(np.floor(knee / REPORT_STEP_QPS) * REPORT_STEP_QPS)
        rows.append((f"knee, {beside} [QPS]", published, last_calm, last_calm == published))
    broken = breaches(own, REPORT_LOADS, REPORT_SLO_US)
    for load in REPORT_LOADS:
        names = sorted(broken.loc[broken["breaks"] & (broken["target_qps"] == load), "beside"])
        stated = load == REPORT_STATED_LOAD
        rows.append(
            (
                f"sources over 2 ms at {load / 1e3:.0f}K QPS",
                ", ".join(REPORT_BREAKING) if stated else "",
                ", ".join(names) or "none",
                names == list(REPORT_BREAKING) if stated else None,
            )
        )
    year = REPORT.split()[0]
    ranked = safe_jobs(_of_year(data.jobs, year), REPORT_BREAKING)
    safest = ranked[0][0] if ranked else "none"
    rows.append(("safest job beside memcached", REPORT_SAFE, safest, safest == REPORT_SAFE))
    return pd.DataFrame(rows, columns=["conclusion", "published", "found", "agrees"])


def _of_year(jobs: pd.DataFrame, year: str) -> pd.DataFrame:
    return normalised(jobs[jobs["source"].str.startswith(year)])


def write_report(folder: Path, out: Path) -> list[str]:
    """
    Analyse the public tables and write tables, pictures and a page.

    :param folder: folder of the public tables
    :param out: folder of the results; made if it is not there
    :return: a line for each conclusion that was checked
    :raises InputError: if the tables cannot be used
    """
    require_folder(out)
    data = read(folder)
    points = curves(data.interference)
    all_knees = knees(points, REPORT_SLO_US)
    broken = breaches(points, REPORT_LOADS, REPORT_SLO_US)
    analyses = queueing(curves(data.scans))
    side_by_side = pd.concat([analysis.rows() for analysis in analyses])
    checks = conclude(data)
    tables = {"knees": all_knees, "breaches": broken, "queueing": side_by_side, "checks": checks}
    sections = [Section("Published conclusions, checked", list(data.remarks), tables=[checks])]
    plot_latency(
        points[points["source"] == REPORT],
        "beside",
        REPORT_SLO_US,
        f"memcached under pressure, {REPORT}",
        out / "pressure.png",
    )
    count = broken.groupby(["target_qps", "beside"])["breaks"].agg(["sum", "size"]).reset_index()
    count.columns = pd.Index(["load [QPS]", "source", "groups that break 2 ms", "groups"])
    sections.append(
        Section("memcached under pressure", pictures=["pressure.png"], tables=[count, all_knees])
    )
    years = sorted(set(data.jobs["source"].str.split().str[0]) - {"0"})
    section = Section("Jobs under pressure (time normalised to alone, medians over groups)")
    for year in years:
        table = _of_year(data.jobs, year)
        if table.empty:
            continue
        tables[f"normalised-{year}"] = table.reset_index()
        plot_normalised(table, year, out / f"normalised-{year}.png")
        section.pictures.append(f"normalised-{year}.png")
        ranked = ", ".join(f"{job} {v:.2f}" for job, v in safe_jobs(table, REPORT_BREAKING))
        section.lines.append(f"{year}, worst time under cpu and l1i, safest first: {ranked}")
    pairs = normalised(data.pairs)
    tables["pairs"] = pairs.reset_index()
    plot_normalised(pairs, "beside another job", out / "pairs.png")
    section.pictures.append("pairs.png")
    sections.append(section)
    latest = data.scaling[data.scaling["source"].str.startswith(REPORT.split()[0])]
    tables["speedups"] = speedups(latest)
    plot_speedups(tables["speedups"], "alone, 2025", out / "speedups.png")
    sections.append(Section("Scaling", pictures=["speedups.png"], tables=[tables["speedups"]]))
    section = Section("Queueing models beside the scans of memcached alone")
    for analysis in analyses:
        section.lines.append(f"{analysis.name}: {analysis.law}.")
        section.lines += [comparison.verdict() for comparison in analysis.comparisons]
    for analysis in [a for a in analyses if a.name.startswith("2025")]:
        name = f"queueing-{analysis.name.replace('/', '-').replace(' ', '-')}.png"
        plot_queueing(analysis, out / name)
        section.pictures.append(name)
    sections.append(section)
    for name, table in tables.items():
        table.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    write_page("Public measurements, characterised", sections, out / "report.html")
    verdicts = {True: "agrees", False: "DIFFERS", None: "found"}
    return [
        f"{verdicts[row.agrees]}: {row.conclusion}: {row.found}"
        + (f" (published: {row.published})" if row.agrees is not None else "")
        for row in checks.itertuples()
    ]
