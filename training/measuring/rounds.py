"""
Rounds of measurements: tables that grow by them, and points that are measured until they are known.

A round is written when it has ended, so that an interrupted characterisation goes on with the next
one. A point is known when half the width of the 95 % interval is at most `MARGIN` of the mean; what
other processes disturbed does not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from deploy.linux.own_folder import OwnFolder
from env.errors import InputError, fault
from env.inputs.text_files import read_json
from training.measuring.pressure import Row
from training.measuring.samples import MARGIN
from training.measuring.testbed import Testbed
from training.statistics import margin

NAMES = dict.fromkeys(("what", "job", "beside"), str)  # a job may be called `1` or `null`


class Store:
    """
    Tables in a folder that grow round by round.

    :param folder: made if it is not there; nobody else may write to it
    :param purpose: what the tables are of; a folder with another purpose is refused
    :raises InputError: if the folder cannot be used
    """

    def __init__(self, folder: Path, purpose: dict[str, object]):
        self.folder = folder
        try:
            OwnFolder(folder).close()  # root writes to it
            plan = folder / "plan.json"
            if plan.exists() and read_json(plan, "a characterisation's plan") != purpose:
                raise InputError(
                    f"{folder}: holds another characterisation (scenario, mode, factors or machine "
                    "differ from its plan.json); give another folder"
                )
            plan.write_text(json.dumps(purpose, indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{folder}: cannot be used: {fault(error)}") from error

    def table(self, name: str) -> pd.DataFrame:
        """
        A table as far as it is filled.

        :param name: name of the table
        """
        path = self.folder / f"{name}.csv"
        if not path.exists():
            return pd.DataFrame({"what": [], "rep": []})
        return pd.read_csv(path, dtype=NAMES, keep_default_na=False, na_values=[""])

    def rows(self, name: str, key: str) -> pd.DataFrame:
        """
        The rows of all rounds of one thing.

        :param name: name of the table
        :param key: what the rounds are of
        """
        table = self.table(name)
        return table[table["what"] == key]

    def spent_s(self, names: Sequence[str]) -> float:
        """
        How long the rounds of some tables have taken.

        :param names: names of the tables
        :return: seconds
        """
        tables = [self.table(name) for name in names]
        rounds = [t.drop_duplicates(["what", "rep"])["round_s"] for t in tables if len(t)]
        return float(sum(seconds.sum() for seconds in rounds))

    def add(self, name: str, key: str, rows: Sequence[Row], took_s: float) -> None:
        """
        Write a round; a file is replaced whole, so that it never holds a part of one.

        :param name: of the table
        :param key: what the round is of
        :param rows: its rows
        :param took_s: how long it took [s]
        """
        old = self.table(name)
        number = int(old.loc[old["what"] == key, "rep"].nunique())
        new = pd.DataFrame([{"what": key, "rep": number, **row, "round_s": took_s} for row in rows])
        table = new if old.empty else pd.concat([old, new], ignore_index=True)
        path = self.folder / f"{name}.csv"
        part = path.with_suffix(".part")
        table.to_csv(part, index=False, float_format="%.7g")
        part.replace(path)


@dataclass(frozen=True)
class Task:
    """
    Something to measure, in rounds.

    :param table: name of the table that receives its rows
    :param key: name of the task
    :param point: the column that tells its points apart
    :param points: their values
    :param response: the column that is to be known
    :param seconds: what a round takes, about
    :param run: measures a round of some of the points
    """

    table: str
    key: str
    point: str
    points: tuple[int, ...]
    response: str
    seconds: float
    run: Callable[[Testbed, Sequence[int]], list[Row]] = field(repr=False)

    def unknown(self, rows: pd.DataFrame, rounds: tuple[int, int]) -> list[int]:
        """
        The points that are to be measured again.

        :param rows: what was measured
        :param rounds: calm ones at least, and all at most
        """
        if rows.empty:
            return list(self.points)
        groups = dict(iter(rows.groupby(self.point)))
        return [point for point in self.points if not self._settled(groups[point], rounds)]

    def _settled(self, rows: pd.DataFrame, rounds: tuple[int, int]) -> bool:
        least, most = rounds
        calm = rows.loc[rows["disturbed"] == 0, self.response]
        if len(rows) >= most or calm.isna().any():  # a job that does not end in time
            return True
        return len(calm) >= least and margin(calm.tolist()) <= MARGIN
