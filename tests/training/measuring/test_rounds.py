"""How often things are measured: until they are known, and no more often than the time allows."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import pytest

from env.errors import InputError
from env.scenario import Job, Scenario
from training.analysis.findings import ALONE
from training.measuring import testbed as testbed_module
from training.measuring.campaign import (
    WHOLE,
    WHOLE_COLUMNS,
    Campaign,
    CampaignPlan,
)
from training.measuring.experiment import combinations, factor, require
from training.measuring.pressure import Row
from training.measuring.rounds import Store, Task
from training.measuring.samples import MARGIN, next_whole_run
from training.measuring.testbed import (
    Timing,
)
from training.statistics import margin

REPEATED = CampaignPlan("repeated", Timing(1.0, 0.3), (3, 9), math.inf, 10.0, 1.0)


class Source:
    """A sweep whose points are known to be calm, noisy, or disturbed in the first two rounds."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self._rng = np.random.default_rng(0)

    @property
    def task(self) -> Task:
        return Task("latency", "sweep", "target_qps", (1, 2, 3), "p95_us", 1.0, self.measure)

    def measure(self, testbed: object, points: Sequence[int]) -> list[Row]:
        self.asked.append(list(points))
        return [
            {
                "target_qps": point,
                "p95_us": 100.0 * (1.0 + (0.5 if point == 2 else 0.01) * self._rng.normal()),
                "disturbed": 2.0 * (point == 3 and len(self.asked) <= 2),
            }
            for point in points
        ]


def repeat(source: Source, mode: CampaignPlan, folder: Path, scenario: Scenario) -> pd.DataFrame:
    """The rows of all rounds that a campaign makes."""
    store = Store(folder, {})
    Campaign(scenario, mode, store).repeat(cast(testbed_module.Testbed, None), [source.task])
    return store.rows("latency", "sweep")


def test_points_are_repeated_until_they_are_known_or_often_enough(
    scenario: Scenario, tmp_path: Path
) -> None:
    source = Source()
    rows = repeat(source, REPEATED, tmp_path, scenario)
    assert source.asked[:5] == [[1, 2, 3]] * 3 + [[2, 3]] * 2
    assert source.asked[5:] == [[2]] * 4  # up to nine rounds
    calm = rows[rows["disturbed"] == 0].groupby("target_qps")["p95_us"].apply(list)
    assert margin(calm[1]) < MARGIN and margin(calm[3]) < MARGIN < margin(calm[2])


def test_rounds_that_were_measured_are_not_measured_again(
    scenario: Scenario, tmp_path: Path
) -> None:
    whole, again = Source(), Source()
    repeat(whole, REPEATED, tmp_path, scenario)
    repeat(again, REPEATED, tmp_path, scenario)
    assert again.asked == []


def test_after_its_time_only_the_least_rounds_are_made(scenario: Scenario, tmp_path: Path) -> None:
    source = Source()
    repeat(source, dataclasses.replace(REPEATED, limit_s=0.5), tmp_path, scenario)
    assert source.asked == [[1, 2, 3]] * 3
    more = Source()  # and given more time, it goes on
    repeat(more, REPEATED, tmp_path, scenario)
    assert more.asked[0] == [2, 3]


def test_a_job_that_does_not_end_in_time_is_run_as_rarely_as_possible() -> None:
    task = Task("jobs", "j", "threads", (1,), "real_s", 1.0, lambda testbed, points: [])
    rows = pd.DataFrame({"threads": [1], "real_s": [math.nan], "disturbed": [0.0]})
    assert task.unknown(rows, (1, 9)) == []


def test_neither_is_one_beside_memcached(scenario: Scenario, tmp_path: Path) -> None:
    tasks = Campaign(scenario, REPEATED, Store(tmp_path, {})).tasks(1e5, 2)
    task = next(one for one in tasks if one.key == "jobs under load")
    ran = {"real_s": math.nan, "cpu_s": 30.0, "disturbed": 0.0}
    rows = pd.DataFrame([{"place": place} | ran for place in task.points])
    assert task.unknown(rows, (1, 9)) == []


@pytest.mark.parametrize("name", ["1", "01", "1e3", "null", "nan"])
def test_a_jobs_name_stays_a_name_in_a_table(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    job = Job(name=name, command=("true",), threads=(1,), memory_mib=1)
    row: Row = {"job": name, "threads": 1, "beside": ALONE, "cpu_s": 2.0, "cycles": math.nan}
    store.add(WHOLE, name, [row | {"real_s": 3.0}], 1.0)
    store.add(WHOLE, name, [row | {"real_s": math.nan}], 1.0)
    rows = store.rows(WHOLE, name)
    assert rows["rep"].tolist() == [0, 1] and rows["job"].tolist() == [name, name]
    assert rows["real_s"].isna().tolist() == [False, True]
    # One that did not end is not run again.
    runs = store.table(WHOLE).reindex(columns=WHOLE_COLUMNS)
    assert next_whole_run([job], 1, runs, 100.0, 3) is None


def test_every_combination_of_levels_is_run_once() -> None:
    factors = [factor("threads=1,2"), factor("beside=none,cpu")]
    assert combinations(factors) == [
        {"beside": "none", "threads": 1},
        {"beside": "none", "threads": 2},
        {"beside": "cpu", "threads": 1},
        {"beside": "cpu", "threads": 2},
    ]
    assert combinations([]) == []


def test_a_factor_is_varied_once(scenario: Scenario) -> None:
    with pytest.raises(InputError, match="once, not threads, threads"):
        require([factor("threads=1,2"), factor("threads=2,4")], scenario)
