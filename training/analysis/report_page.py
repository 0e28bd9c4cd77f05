"""
The report of a characterisation: pictures, tables and sentences on one HTML page.

Pictures are the reference reports': latency lines with error bars in both dimensions, the coloured
table of normalised times, speed-up lines; and queueing models beside what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from env.errors import InputError
from training.analysis.findings import ALONE, CALM, SOURCES, STRAINED, Queueing
from training.analysis.palette import PALETTE

GREEN, ORANGE, RED = "#8fd19e", "#ffc078", "#f28b82"
MARKERS = "osD^v<>p*"

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.45 sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px }
td, th { border: 1px solid #ccc; padding: .2em .6em; text-align: right }
td:first-child, th:first-child { text-align: left }
img { max-width: 100% }
</style></head><body><h1>{{ title }}</h1>
{% for section in sections %}<h2>{{ section.title }}</h2>
{% for line in section.lines %}<p>{{ line }}</p>
{% endfor %}{% for picture in section.pictures %}<img src="{{ picture }}" alt="{{ section.title }}">
{% endfor %}{% for table in section.tables %}<table><tr>{% for name in table.columns %}<th>{{
name }}</th>{% endfor %}</tr>{% for row in table.itertuples(index=False) %}
<tr>{% for cell in row %}<td>{{ cell | shown }}</td>{% endfor %}</tr>{% endfor %}</table>
{% endfor %}{% endfor %}</body></html>
"""


@dataclass
class Section:
    """
    A part of the report.

    :param title: its heading
    :param lines: sentences
    :param pictures: file names beside the page
    :param tables: shown as they are; numbers are rounded
    """

    title: str
    lines: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    tables: list[pd.DataFrame] = field(default_factory=list)


def write_page(title: str, sections: Sequence[Section], path: Path) -> None:
    """
    Write the HTML page.

    :param title: its heading
    :param sections: its parts
    :param path: the file to write
    :raises InputError: if it cannot be written
    """
    environment = jinja2.Environment(autoescape=True)
    environment.filters["shown"] = _shown
    text = environment.from_string(PAGE).render(title=title, sections=sections)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error


def _shown(value: object) -> str:
    """A cell of a table: numbers to four digits, nothing for what is not known."""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (int, np.integer)):
        return f"{value:,d}"
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if not np.isfinite(number):
            return ""
        return f"{number:,.0f}" if abs(number) >= 1000.0 else f"{number:.4g}"
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Panel:
    """
    One quantity against the load.

    :param column: of the averaged points
    :param label: of its axis
    :param unit: what the axis counts in, in the column's unit
    """

    column: str
    label: str
    unit: float

    @property
    def latency(self) -> bool:
        """Whether the quantity is a latency, which spans orders of magnitude."""
        return self.column.endswith("_us")


P95 = Panel("p95_us", "p95 latency [ms]", 1e3)
PANELS = (
    P95,
    Panel("p99_us", "p99 latency [ms]", 1e3),
    Panel("p50_us", "median latency [ms]", 1e3),
    Panel("cpu_util_pct", "CPU of memcached [vCPUs]", 1e2),
)


def plot_latency(
    points: pd.DataFrame,
    by: str,
    slo_us: float,
    title: str,
    path: Path,
    panels: Sequence[Panel] = (P95,),
) -> None:
    """
    Lines of latency against the load served, with 95 % intervals in both dimensions.

    :param points: averaged points (`training.analysis.findings.curves`)
    :param by: the column that tells lines apart
    :param slo_us: drawn as a line where p95 is [µs]
    :param title: of the picture
    :param path: the picture to write (.png)
    :param panels: what is drawn, in rows of two
    """
    rows, columns = (len(panels) + 1) // 2, min(len(panels), 2)
    figure = Figure(figsize=(3.0 + 5.5 * columns, 1.2 + 4.0 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _plot_panel(axes, points, by, panel)
    first = grid.flat[0]
    first.axhline(slo_us / 1e3, color="#777777", linestyle="--", linewidth=1.0)
    first.set_ylim(top=max(first.get_ylim()[1], 1.5 * slo_us / 1e3))
    first.legend(fontsize="small", ncols=2)
    low, high = int(points["n"].min()), int(points["n"].max())
    runs = f"{low}" if low == high else f"{low} to {high}"
    shown = "one run each" if high == 1 else f"means of {runs} runs, 95 % intervals"
    figure.suptitle(f"{title}\n{shown}; dashed: {slo_us:g} us")
    figure.savefig(path, dpi=110)


def _plot_panel(axes: Axes, points: pd.DataFrame, by: str, panel: Panel) -> None:
    for k, (name, curve) in enumerate(points.groupby(by, sort=True)):
        curve = curve.sort_values("target_qps")
        axes.errorbar(
            curve["achieved_qps"] / 1e3,
            curve[panel.column] / panel.unit,
            xerr=curve["achieved_qps_ci"].fillna(0.0) / 1e3,
            yerr=curve[f"{panel.column}_ci"].fillna(0.0) / panel.unit,
            label="alone" if name == ALONE else str(name),
            color=PALETTE[k % len(PALETTE)],
            marker=MARKERS[k % len(MARKERS)],
            markersize=4,
            linewidth=1.3,
            capsize=2,
        )
    # The interval of two runs may be wider than all curves together: the axes follow the means.
    means = points[panel.column] / panel.unit
    axes.set_xlim(0.0, 1.1 * points["achieved_qps"].max() / 1e3)
    if panel.latency:
        _logarithmic(axes)
        axes.set_ylim(0.5 * means.min(), 2.0 * means.max())
    else:
        axes.set_ylim(0.0, 1.2 * means.max())
    axes.set_xlabel("load served [1000 requests/s]")
    axes.set_ylabel(panel.label)
    axes.grid(alpha=0.3)


def _logarithmic(axes: Axes) -> None:
    """A logarithmic y axis whose ticks are plain numbers, of the minor ones the 2 and the 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    )
    axes.tick_params(axis="y", which="minor", labelsize=7)


def plot_normalised(table: pd.DataFrame, title: str, path: Path) -> None:
    """
    The table of normalised times, green up to 1.3, orange up to 2, red above.

    :param table: one row a job, one column a source (`training.analysis.findings.normalised`)
    :param title: of the picture
    :param path: the picture to write (.png)
    """
    columns = [name for name in SOURCES if name in table.columns]
    columns += [name for name in table.columns if name not in columns]
    figure = Figure(figsize=(1.6 + 1.1 * len(columns), 1.2 + 0.42 * len(table)))
    axes = figure.subplots()
    axes.axis("off")
    axes.set_title(title, fontsize="medium")
    values = table[columns].to_numpy(np.float64)
    axes.table(
        cellText=[["" if np.isnan(v) else f"{v:.2f}" for v in row] for row in values],
        cellColours=[[_colour(v) for v in row] for row in values],
        rowLabels=[str(name) for name in table.index],
        colLabels=columns,
        cellLoc="center",
        loc="center",
    ).scale(1.0, 1.4)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _colour(value: float) -> str:
    if np.isnan(value):
        return "white"
    return GREEN if value <= CALM else ORANGE if value <= STRAINED else RED


def plot_speedups(table: pd.DataFrame, title: str, path: Path) -> None:
    """
    Speed-up against threads, a line a job, beside the ideal.

    :param table: what `training.analysis.findings.speedups` made
    :param title: of the picture
    :param path: the picture to write (.png)
    """
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for k, (job, rows) in enumerate(table.groupby("job", sort=True)):
        axes.errorbar(
            rows["threads"],
            rows["speedup"],
            yerr=rows["speedup_ci"].fillna(0.0),
            label=str(job),
            color=PALETTE[k % len(PALETTE)],
            marker=MARKERS[k % len(MARKERS)],
            capsize=2,
        )
    most = float(table["threads"].max())
    axes.plot([1.0, most], [1.0, most], color="#777777", linestyle=":", label="ideal")
    axes.set_xlabel("threads")
    axes.set_ylabel("speed-up")
    axes.set_title(title)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def plot_queueing(analysis: Queueing, path: Path) -> None:
    """
    Mean response time, measured and as each model predicts it.

    :param analysis: of one curve
    :param path: the picture to write (.png)
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    points = analysis.comparisons[0].points
    axes.plot(
        [p.throughput / 1e3 for p in points],
        [1e6 * p.response_s for p in points],
        "ko",
        markersize=4,
        label="measured",
    )
    for k, comparison in enumerate(analysis.comparisons):
        known = [state for state in comparison.states if state is not None]
        axes.plot(
            [state.throughput / 1e3 for state in known],
            [1e6 * state.response_s for state in known],
            color=PALETTE[k],
            marker=MARKERS[k],
            markersize=3,
            label=comparison.model.name,
        )
    _logarithmic(axes)
    axes.set_xlabel("throughput [1000 requests/s]")
    axes.set_ylabel("mean response time [us]")
    axes.set_title(analysis.name)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
