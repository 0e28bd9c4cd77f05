"""Which runs of jobs that cannot be cut are made, within their budget."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from env.scenario import Job, load_scenario
from training.analysis.findings import ALONE
from training.measuring.campaign import WHOLE_COLUMNS
from training.measuring.samples import LOADED, SERVING, company, is_cut, next_whole_run

VCPUS, MOST = 2, 3


def job(name: str, *threads: int) -> Job:
    return Job(name=name, command=("sh", "-c", name), threads=threads or (1, 2), memory_mib=64)


def campaign(
    jobs: list[Job], work_s: dict[str, float], budget_s: float, cycles: float = math.nan
) -> pd.DataFrame:
    """The runs that are made if each job takes its work by the threads, twice beside memcached."""
    rows: list[tuple[object, ...]] = []
    used_s = 0.0
    while True:
        table = pd.DataFrame(rows, columns=list(WHOLE_COLUMNS))
        run = next_whole_run(jobs, VCPUS, table, budget_s - used_s, MOST)
        if run is None:
            assert used_s <= budget_s
            return table
        took_s = work_s[run.job.name] / run.threads * (2.0 if run.beside == SERVING else 1.0)
        real_s = took_s if took_s <= run.limit_s else math.nan
        used_s += min(took_s, run.limit_s)
        cpu_s = min(work_s[run.job.name], run.limit_s * run.threads)
        rows.append((run.job.name, run.threads, run.beside, real_s, cpu_s, cycles))


def made(table: pd.DataFrame) -> list[tuple[str, int, str]]:
    return list(table[["job", "threads", "beside"]].itertuples(index=False, name=None))


@pytest.mark.parametrize(
    ("own", "last", "met"),
    [
        ((0,), 1, {SERVING: (0,), LOADED: (1,)}),
        ((0, 1), 1, {SERVING: (0, 1)}),  # it shares memcached's vCPUs
        ((0,), 3, {SERVING: (0,)}),  # it runs on one of its own
    ],
)
def test_jobs_meet_the_load_generator_where_the_scenario_has_its_vcpu(
    own: tuple[int, ...], last: int, met: dict[str, tuple[int, ...]]
) -> None:
    assert company(load_scenario("local"), own, last) == met


def test_with_time_every_job_is_run_in_every_way_and_twice() -> None:
    table = campaign([job("a"), job("b")], {"a": 4.0, "b": 8.0}, 300.0)
    assert made(table)[:6] == [
        *(("a", 2, ALONE), ("b", 2, ALONE)),
        *(("a", 1, ALONE), ("b", 1, ALONE)),
        *(("a", 1, SERVING), ("b", 1, SERVING)),
    ]
    # Two runs that agree are enough, and beside memcached one.
    assert sorted(made(table)[6:]) == sorted(made(table)[:4])


def test_little_time_goes_to_each_jobs_quickest_run_first() -> None:
    table = campaign([job("a"), job("b"), job("c")], dict.fromkeys("abc", 40.0), 65.0)
    assert made(table) == [(name, 2, ALONE) for name in "abc"]
    assert table["real_s"].notna().all()


def test_a_job_that_does_not_end_leaves_time_for_the_others() -> None:
    table = campaign([job("endless"), job("b")], {"endless": 1e6, "b": 10.0}, 100.0)
    assert made(table)[:2] == [("endless", 2, ALONE), ("b", 2, ALONE)]
    assert table["job"].tolist().count("endless") == 1  # it would not end the next time
    assert table["real_s"].isna().tolist()[:2] == [True, False]
    assert table["cpu_s"][0] == pytest.approx(2 * 80.0)  # 20 s are the other's


def test_where_cycles_are_counted_a_stretch_beside_memcached_will_do() -> None:
    jobs = [job("a", 1)]
    without = campaign(jobs, {"a": 40.0}, 70.0)
    assert SERVING not in set(without["beside"])
    counted = campaign(jobs, {"a": 40.0}, 70.0, cycles=1e9)
    assert made(counted) == [("a", 1, ALONE), ("a", 1, SERVING)]
    assert counted["real_s"].isna().tolist() == [False, True]


def test_threads_that_do_not_fit_are_not_run() -> None:
    assert made(campaign([job("a", 1, 4)], {"a": 1.0}, 10.0))[0] == ("a", 1, ALONE)
    assert campaign([job("a", 4)], {"a": 1.0}, 10.0).empty


def test_what_says_how_much_work_it_has_is_cut() -> None:
    command = ("stress-ng", "--cpu", "{threads}", "--cpu-ops", "5000")
    assert is_cut(job("cpu").model_copy(update={"command": command}))
    assert not is_cut(job("xz").model_copy(update={"command": ("xz", "-k", "file")}))
