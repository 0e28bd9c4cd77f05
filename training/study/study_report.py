"""What the runs of a study say: tables, pictures, and sentences that only say what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from training.analysis.effects import analyse, from_table
from training.analysis.palette import PALETTE
from training.analysis.queueing import (
    Comparison,
    Model,
    Point,
    bottleneck,
    fit_closed,
    fit_open,
    law_error,
)
from training.analysis.report_page import MARKERS, Section, write_page
from training.statistics import mean_and_ci95
from training.study.study_measure import PERCENTILES
from training.study.study_plan import FIELDS, StudyExperiment, StudyPlan

NEAR_MOST = 0.95
"""The fewest clients that get so much of the largest throughput are where it saturates."""

AXES = {
    "clients": "clients",
    "members": "servers",
    "writes": "share of SETs",
    "keys": "keys of a GET",
}
MEASURED = (
    *("throughput", "mean_us", "get_us", "set_us", "get_server_us", "set_server_us"),
    *(f"p{each}_us" for each in PERCENTILES),
    *("members_vcpus", "busiest_member_vcpus", "proxy_vcpus", "client_vcpus", "foreign_vcpus"),
    *("failed", "misses"),
)


def averages(runs: pd.DataFrame) -> pd.DataFrame:
    """
    The mean of each point's calm runs, of all its runs where none was calm.

    :param runs: the table of runs
    :return: `FIELDS`, the means, `n`, and the margins of throughput and response time
    """
    rows = []
    for values, own in runs.groupby(list(FIELDS), sort=True):
        calm = own[own["disturbed"] == 0]
        used = calm if len(calm) else own
        row = dict(zip(FIELDS, values, strict=True))
        row |= {name: float(used[name].mean()) for name in MEASURED}
        for name in ("throughput", "mean_us"):
            mean, half = mean_and_ci95(used[name].tolist())
            row[f"{name}_margin"] = math.nan if half is None else half / mean
        row |= {"n": len(used), "disturbed": len(own) - len(calm)}
        row["queue_us"] = row["mean_us"] - _served_us(row)
        rows.append(row)
    return pd.DataFrame(rows)


def _served_us(row: dict[str, float]) -> float:
    """Mean time at members over GETs and SETs; only where a request asks for one key."""
    if row["keys"] > 1:
        return math.nan
    writes = row["writes"]
    parts = ((1.0 - writes, row["get_server_us"]), (writes, row["set_server_us"]))
    return sum(share * each for share, each in parts if share > 0.0)


def write_report(plan: StudyPlan, quick: bool, runs: pd.DataFrame, folder: Path) -> list[str]:
    """
    Write `means.csv`, `models.csv`, `effects.csv`, pictures and `report.html`.

    :param plan: what was measured
    :param quick: whether with less effort
    :param runs: the table of runs
    :param folder: of the results
    :return: the sentences of the report
    :raises OSError: if the disk refuses a table or a picture
    :raises InputError: if the page cannot be written
    """
    means = averages(runs)
    sections, models, effects = [], [], []
    for experiment in plan.experiments:
        wanted = pd.DataFrame([point.fields for point in experiment.points(quick)])
        own = wanted.merge(means, on=list(FIELDS))
        section = Section(experiment.title)
        if experiment.shown == "factors":
            for response in ("throughput", "mean_us"):
                effects.append(_factors(experiment, wanted, runs, response, section))
        else:
            picture = f"{experiment.name}.png"
            _draw(experiment, own, folder / picture)
            section.pictures.append(picture)
            for name, line in _lines(experiment, own):
                section.lines.append(f"{name}: {_sentence(experiment, line)}")
                if experiment.shown == "clients":
                    said, table = _models(f"{experiment.name}: {name}", line)
                    section.lines += [f"{name}: {each}" for each in said]
                    models.append(table)
        section.lines.append(_margins(own))
        section.tables.append(_shown(own))
        sections.append(section)
    sections.append(Section("Spread of keys over servers", _spread(runs)))
    means.to_csv(folder / "means.csv", index=False, float_format="%.6g")
    for name, parts in (("models", models), ("effects", effects)):
        if parts:
            table = pd.concat(parts, ignore_index=True)
            table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    write_page(f"{plan.name}{' (quick)' if quick else ''}", sections, folder / "report.html")
    return [f"{each.title}: {line}" for each in sections for line in each.lines]


def _lines(experiment: StudyExperiment, own: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The lines of a picture: points that differ by what is along the axis alone."""
    others = [f for f in FIELDS if f != experiment.shown and own[f].nunique() > 1]
    if not others:
        yield "all", own.sort_values(experiment.shown)
        return
    for values, line in own.groupby(others, sort=True):
        name = ", ".join(f"{f} {v}" for f, v in zip(others, values, strict=True))
        yield name.replace("_", " "), line.sort_values(experiment.shown)


def _draw(experiment: StudyExperiment, own: pd.DataFrame, path: Path) -> None:
    figure = Figure(figsize=(13, 5), layout="constrained")
    panels = (
        ("throughput", "throughput [1000 requests/s]", 1e3),
        ("mean_us", "response [ms]", 1e3),
    )
    for axes, (column, label, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        for k, (name, line) in enumerate(_lines(experiment, own)):
            axes.errorbar(
                line[experiment.shown],
                line[column] / unit,
                yerr=(line[f"{column}_margin"].fillna(0.0) * line[column] / unit),
                label=name,
                color=PALETTE[k % len(PALETTE)],
                marker=MARKERS[k % len(MARKERS)],
                markersize=4,
                capsize=2,
            )
        if experiment.shown == "clients":
            axes.set_xscale("log", base=2)
        axes.set_xlabel(AXES[experiment.shown])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0.0, top=1.2 * float(own[column].max()) / unit)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="x-small")
    figure.suptitle(f"{experiment.title}\nmeans and 95 % intervals")
    figure.savefig(path, dpi=110)


def _sentence(experiment: StudyExperiment, line: pd.DataFrame) -> str:
    """What a line says."""
    if experiment.shown != "clients":
        steps = ", ".join(
            f"{row[experiment.shown]:g}: {row['throughput']:,.0f}/s ({row['mean_us']:,.0f} us)"
            for _, row in line.iterrows()
        )
        return f"by {AXES[experiment.shown]} {steps}."
    most = float(line["throughput"].max())
    at = line[line["throughput"] >= NEAR_MOST * most].iloc[0]
    busy = {
        "the group's vCPU": at["members_vcpus"] + at["proxy_vcpus"],
        "the clients' vCPU": at["client_vcpus"],
    }
    law = max((law_error(each) for each in _points(line)), key=abs)
    text = f"most {most:,.0f}/s; {at['clients']:.0f} clients get {NEAR_MOST:.0%} of it"
    text += f" in {at['mean_us']:,.0f} us"
    if math.isfinite(at["queue_us"]):
        text += f", of which {at['queue_us']:,.0f} before the proxy hands it on"
    text += f"; busiest is {bottleneck(busy)}, the proxy takes {at['proxy_vcpus']:.0%}"
    text += f" and servers {at['members_vcpus']:.0%}; N = X R holds within {abs(law):.1%}."
    return text


def _points(line: pd.DataFrame) -> list[Point]:
    return [
        Point(math.inf, x, 1e-6 * mean_us, float(clients), busy)
        for x, mean_us, clients, busy in zip(
            line["throughput"],
            line["mean_us"],
            line["clients"],
            line["members_vcpus"] + line["proxy_vcpus"],
            strict=True,
        )
    ]


def _models(name: str, line: pd.DataFrame) -> tuple[list[str], pd.DataFrame]:
    """
    Three models of a line, each beside what was measured.

    M/M/1 and M/M/m (m threads of the proxy) take the throughput for the arrivals, and are fitted
    where it still rises; the network of queues is one server (the group's vCPU) and a delay.
    """
    closed = _points(line)
    most = max(point.throughput for point in closed)
    rising = next(k for k, p in enumerate(closed) if p.throughput >= NEAR_MOST * most) + 1
    opened = [
        Point(p.throughput, p.throughput, p.response_s, p.in_flight, p.utilisation) for p in closed
    ]
    threads = int(line["proxy_threads"].iloc[0])
    said, rows = [], []
    fits: list[tuple[str, Model, list[Point]]] = []
    for servers in sorted({1, threads}):
        if rising >= 3:
            model = fit_open(opened[:rising], servers)
            fits.append((model.name, model, opened[:rising]))
        else:
            said.append(f"M/M/{servers} is not fitted: {rising} points until it saturates, not 3.")
    if len(closed) >= 3:
        fits.append(("network of queues", fit_closed(closed, 1), closed))
    for called, fitted, points in fits:
        states = tuple(fitted.predict(point) for point in points)
        comparison = Comparison(fitted, tuple(points), states)
        errors = [abs(each) for each in comparison.response_errors()]
        said.append(
            f"{called}, service {1e6 * fitted.service_s:.1f} us and delay "
            f"{1e6 * fitted.delay_s:.0f} us: response times off by {np.median(errors):.0%} in the "
            f"middle, {max(errors):.0%} at most, up to {points[-1].in_flight:.0f} clients."
        )
        for point, state in zip(points, states, strict=True):
            rows.append(
                {
                    "line": name,
                    "model": called,
                    "clients": point.in_flight,
                    "measured_qps": point.throughput,
                    "predicted_qps": math.nan if state is None else state.throughput,
                    "measured_us": 1e6 * point.response_s,
                    "predicted_us": math.nan if state is None else 1e6 * state.response_s,
                }
            )
    return said, pd.DataFrame(rows)


def _factors(
    experiment: StudyExperiment,
    wanted: pd.DataFrame,
    runs: pd.DataFrame,
    response: str,
    section: Section,
) -> pd.DataFrame:
    """The effects of a 2^k r design on one response, into a part of the report."""
    factors = [field for field in FIELDS if wanted[field].nunique() == 2]
    own = wanted.merge(runs, on=list(FIELDS)).sort_values("disturbed", kind="stable")
    responses = from_table(own, factors, response)  # the runs that are in surplus are the last
    result = analyse(factors, responses)
    table = pd.DataFrame(
        {
            "experiment": experiment.name,
            "response": response,
            "effect": each.name,
            "value": each.value,
            "low": each.low,
            "high": each.high,
            "share": each.share,
        }
        for each in result.effects
    )
    ranked = sorted(result.effects[1:], key=lambda each: -each.share)[:3]
    largest = ", ".join(f"{each.name} {each.share:.0%}" for each in ranked)
    section.lines.append(
        f"{response}: of the variation {largest}, errors {result.error_share:.0%} "
        f"(r = {responses.shape[1]})."
    )
    section.lines += [f"{response}: {each}" for each in result.checks()]
    section.tables.append(table)
    return table


def _margins(own: pd.DataFrame) -> str:
    """How well the points of an experiment are known."""
    known = own["throughput_margin"].dropna()
    text = f"{len(own)} points of {own['n'].min()} to {own['n'].max()} runs"
    if len(known):
        text += (
            f"; throughput is known to {known.median():.1%} in the middle and "
            f"{known.max():.1%} at worst"
        )
    return f"{text}; {own['disturbed'].sum()} runs were disturbed and left out or repeated."


def _spread(runs: pd.DataFrame) -> list[str]:
    """How evenly GETs went to servers, by their number; multi-gets sent whole are left out."""
    lines = []
    hashed = runs[(runs["multi_get"] == "sharded") & (runs["members"] > 1) & (runs["writes"] < 1)]
    for members, own in hashed.groupby("members"):
        counts = np.array([[int(n) for n in text.split(";")] for text in own["gets_by_member"]])
        shares = counts.sum(axis=0) / counts.sum()
        lines.append(
            f"{members} servers: {counts.sum():,d} GETs, {shares.min():.1%} to {shares.max():.1%} "
            f"of them each ({1 / members:.1%} would be even)."
        )
    return lines


def _shown(own: pd.DataFrame) -> pd.DataFrame:
    """The columns of the report's table, without the fields that do not differ."""
    fields = [field for field in FIELDS if own[field].nunique() > 1]
    measured = ["throughput", "throughput_margin", "mean_us", "queue_us", "get_server_us"]
    measured += ["set_server_us", "p25_us", "p50_us", "p75_us", "p90_us", "p95_us", "p99_us"]
    measured += ["members_vcpus", "proxy_vcpus", "client_vcpus", "n", "disturbed"]
    return own[[*fields, *measured]].dropna(axis="columns", how="all")
