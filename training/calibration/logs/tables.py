"""
Tables of measured runs: read, checked, and freed of rows that cannot be.

A table is a `.csv` or `.csv.gz` of a folder. Whatever is left out is left out by a named rule and
kept as a `Remark`, with file, run and row. Faults of a whole table (missing file or column, no
rows) raise `InputError`; faults of a row drop that row.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from env.errors import InputError
from env.inputs.text_files import MOST_RECORD_BYTES, read_expanded

NAMELESS = "repo or path is missing"

# Latencies are in microseconds. Below this a p95 over a network is not believable: it is in ms.
LOWEST_P95_US = 20.0

COLUMNS: dict[str, tuple[str, ...]] = {
    "runs": ("run", "repo"),
    "intervals": ("run", "i", "t_start_s", "t_end_s", "target_qps", "p95_us"),
    "events": ("run", "t_s", "event", "job", "cores", "threads"),
    "job_scaling": (
        *("repo", "year", "machine", "job", "threads", "real_s", "user_s", "sys_s"),
        "path",
    ),
    "job_interference": ("repo", "year", "job", "interference", "real_s"),
    "job_pairs": ("repo", "job", "colocated_with(no=alone)", "time_s"),
    "memcached_interference": (
        *("repo", "year", "interference", "rep", "target_qps", "achieved_qps", "p95_us"),
    ),
    "latency_curves": (
        *("repo", "path", "threads", "cores", "rep", "target_qps", "achieved_qps", "p95_us"),
        *("year", "cpu_util_pct"),
    ),
}

NAMES = dict.fromkeys(("run", "repo", "path", "job", "event", "interference"), str)
"""Columns of names, which are texts also where all of them look like numbers."""


@dataclass(frozen=True)
class Remark:
    """One thing that was skipped, dropped or corrected, and why."""

    file: str
    run: str
    row: int
    what: str

    def __str__(self) -> str:
        row = f", row {self.row}" if self.row >= 0 else ""
        run = f", run {self.run}" if self.run else ""
        return f"{self.file}{run}{row}: {self.what}"


def summarise(remarks: Iterable[Remark], rows: bool = False) -> list[str]:
    """
    One line per file and kind of remark, with how often and for which runs.

    :param remarks: in any order
    :param rows: name the first row of each run, too. The shipped profiles, whose hash covers what
        was left out, are without.
    """
    kinds: dict[tuple[str, str], list[Remark]] = {}
    for remark in remarks:
        kinds.setdefault((remark.file, remark.what), []).append(remark)
    lines = []
    for (file, what), members in kinds.items():
        if len(members) == 1:
            lines.append(str(members[0]))
            continue
        runs: dict[str, int] = {}
        for member in members:
            if member.run:
                runs.setdefault(member.run, member.row)
        named = [f"{run} row {row}" if rows and row >= 0 else run for run, row in runs.items()]
        shown = ", ".join(named[:3]) + (", ..." if len(runs) > 3 else "")
        lines.append(f"{file}: {what}: {len(members)} times in {len(runs)} runs ({shown})")
    return lines


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """
    Read one table of a folder and check that it is there, has its columns and has rows.

    :param folder: folder of measured tables
    :param name: name of the table, a file without its suffix
    :raises InputError: one line that names the file and what is wrong
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    for suffix in (".csv.gz", ".csv"):
        path = folder / f"{name}{suffix}"
        if path.is_file():
            break
    else:
        raise InputError(f"{folder}: no table {name}.csv or {name}.csv.gz")
    content = read_expanded(path, "a table", MOST_RECORD_BYTES)
    try:
        table = pd.read_csv(io.BytesIO(content), dtype=NAMES, low_memory=False)
    except ValueError as error:
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(table.index, pd.RangeIndex):  # pandas takes the surplus for names of rows
        raise InputError(f"{path}: rows have more values than its heading names")
    missing = [column for column in COLUMNS.get(name, ()) if column not in table.columns]
    if missing:
        raise InputError(f"{path}: missing columns: {', '.join(missing)}")
    if table.empty:
        raise InputError(f"{path}: has no rows")
    return table


def numeric(
    table: pd.DataFrame,
    file: str,
    columns: Sequence[str],
    remarks: list[Remark],
    label: str = "run",
) -> pd.DataFrame:
    """
    Drop rows whose numbers are not finite numbers; see `without`.

    :param table: the rows to check
    :param file: name of the table, for remarks
    :param columns: columns that must hold numbers
    :param remarks: receives what is left out
    :param label: column that names a row, for remarks
    """
    table = table.assign(**{column: numbers(table[column]) for column in columns})
    faults = [(table[name].isna(), f"{name} is not a number") for name in columns]
    return without(table, file, faults, remarks, label)


def numbers(column: pd.Series) -> pd.Series:
    """
    A column's numbers; what is none, or none that a float holds, is NaN.

    :param column: as it was read
    """
    try:
        found = pd.to_numeric(column, errors="coerce")
    except OverflowError:  # of whole numbers; of texts it is infinite
        found = pd.to_numeric(column.astype(str), errors="coerce")
    return found.where(np.isfinite(found))


def nameless(scans: pd.DataFrame) -> pd.Series:
    """
    Which points of scans do not say whose they are.

    :param scans: the table `latency_curves`
    """
    return scans["repo"].isna() | scans["path"].isna()


def p95_faults(p95_us: pd.Series) -> tuple[tuple[pd.Series, str], ...]:
    """
    What a measured p95 cannot be, and which ones are.

    :param p95_us: measured p95 [us]
    :return: for each fault, the rows that have it and what it is
    """
    return (
        (p95_us <= 0.0, "p95 is not positive"),
        (p95_us < LOWEST_P95_US, f"p95 under {LOWEST_P95_US:g} us: in ms?"),
    )


def without(
    table: pd.DataFrame,
    file: str,
    faults: Iterable[tuple[pd.Series, str]],
    remarks: list[Remark],
    label: str = "run",
) -> pd.DataFrame:
    """
    Drop faulty rows.

    :param table: what is checked
    :param file: the table's name
    :param faults: which rows have it, and what it is; a row is named for its first one
    :param remarks: each row is added here
    :param label: the column that says where a row is from
    """
    good = pd.Series(True, index=table.index)
    for bad, what in faults:
        for index in table.index[bad & good]:
            run = str(table.at[index, label])
            remarks.append(Remark(file, run, int(index), f"dropped: {what}"))
        good &= ~bad
    return table[good]
