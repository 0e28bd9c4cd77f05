"""What runs of a job say of it, and what is believed of one that has hardly run."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from env.family.drawing import generic_traits
from env.physics.parameters import OPTIONAL_JOB_FIELDS, REQUIRED_JOB_FIELDS
from env.scenario import Job
from env.simulator.profile import Parameter, Profile, load_profile
from training.analysis.findings import ALONE
from training.machine.job_traits import (
    as_prior,
    dearer_beside,
    job_traits,
    left_by_load,
    unhindered,
)
from training.measuring.samples import LOADED, SERVED, SERVING

COMPANY = {SERVING: 0.4, LOADED: 0.6}  # shares of a vCPU


@pytest.fixture(scope="module")
def base() -> Profile:
    return load_profile("local")


def run(
    threads: int, real_s: float, cpu_s: float, beside: str = ALONE, instructions: float = math.nan
) -> dict[str, object]:
    return {
        "job": "pack",
        "threads": threads,
        "beside": beside,
        "real_s": real_s,
        "cpu_s": cpu_s,
        "instructions": instructions,
        "sampled": 1.0,
        "overhead_s": 0.01,
        "disturbed": 0.0,
    }


def test_two_thread_counts_tell_work_and_serial_fraction(base: Profile) -> None:
    runs = pd.DataFrame([run(1, 20.01, 20.0), run(2, 11.01, 20.0)])
    traits = job_traits("pack", runs, base, COMPANY)
    assert set(traits) == {*REQUIRED_JOB_FIELDS, *OPTIONAL_JOB_FIELDS}
    assert traits["work_s"].value == pytest.approx(20.0, rel=0.02)
    assert traits["work_s"].spread >= 0.03  # one run each
    share = traits["serial_fraction"].value
    assert share + (1.0 - share) / 2.0 == pytest.approx(0.55, rel=0.04)
    assert traits["sensitivity"].value == pytest.approx(
        generic_traits()["sensitivity"][0], rel=1e-3
    )
    assert traits["sensitivity"].source.startswith("prior (any job")


@pytest.mark.parametrize("real_s", [15.5, 20.0, 54.0])
def test_threads_that_hinder_each_other_say_nothing_of_the_work(
    base: Profile, real_s: float
) -> None:
    runs = pd.DataFrame([run(1, 20.01, 20.0), run(2, real_s + 0.01, 2.0 * real_s)])
    traits = job_traits("pack", runs, base, COMPANY)
    assert traits["work_s"].value == pytest.approx(20.0, rel=0.02)
    assert traits["work_s"].spread < 0.1
    assert traits["serial_fraction"].value == pytest.approx(0.5, rel=0.1)  # the prior's bound
    assert "hinder" in traits["serial_fraction"].source


def test_threads_that_hinder_each_other_are_not_rehearsed() -> None:
    job = Job(name="pack", command=("pack",), threads=(1, 2, 4), memory_mib=64)
    times = {1: 20.0, 2: 23.0, 4: 12.0}
    runs = [run(count, real_s, 20.0) for count, real_s in times.items()]
    beside = [run(4, 60.0, 20.0, SERVING), run(2, 1.0, 20.0) | {"job": "other"}]
    assert unhindered(job, pd.DataFrame([*runs, *beside])).threads == (1, 4)
    assert unhindered(job, pd.DataFrame(runs[:1])).threads == (1, 2, 4)  # none has shown otherwise
    never = pd.DataFrame([*runs[:1], run(2, math.nan, 20.0)])
    assert unhindered(job, never).threads == (1, 2, 4)


def test_a_count_of_threads_that_scales_keeps_its_word(base: Profile) -> None:
    runs = [run(1, 20.01, 20.0), run(2, 11.01, 20.0), run(4, 25.01, 80.0)]
    traits = job_traits("pack", pd.DataFrame(runs), base, COMPANY)
    share = traits["serial_fraction"].value
    assert traits["work_s"].value * (share + (1.0 - share) / 2.0) == pytest.approx(11.0, rel=0.15)


def test_a_prior_names_where_it_is_from_once(base: Profile) -> None:
    parameter = Parameter(value=1.0, spread=0.1, unit="1", source="events")
    once = as_prior(parameter, base)
    assert once.source == f"prior (profile {base.name}): events"
    assert as_prior(once, base) == once


def test_the_cpu_time_of_several_threads_stands_for_the_run_of_one(base: Profile) -> None:
    traits = job_traits("pack", pd.DataFrame([run(2, 15.01, 20.0)]), base, COMPANY)
    assert traits["work_s"].value == pytest.approx(20.0, rel=0.1)
    assert traits["work_s"].spread >= 0.1
    share = traits["serial_fraction"].value
    assert share + (1.0 - share) / 2.0 == pytest.approx(0.75, rel=0.1)


def test_what_memcached_makes_dearer_is_no_work_of_the_jobs_own(base: Profile) -> None:
    alone, beside = run(1, 20.01, 20.0), run(1, 60.0, 28.8, SERVING)
    traits = job_traits("pack", pd.DataFrame([alone, beside]), base, COMPANY)
    assert traits["work_s"].value == pytest.approx(20.0, rel=0.02)
    cost = traits["interruption"]
    assert 0.35 < cost.value < 0.44 / COMPANY[SERVING]  # one run is believed in part
    assert "1.44 (memcached) times as much" in cost.source


def test_memcacheds_and_the_load_generators_company_cost_a_share_the_same(base: Profile) -> None:
    runs = [run(1, 20.01, 20.0), run(1, 60.0, 28.0, SERVING), run(1, 60.0, 32.0, LOADED)]
    both = job_traits("pack", pd.DataFrame(runs), base, COMPANY)["interruption"]
    assert both.value == pytest.approx(1.0, rel=0.1)
    one = job_traits("pack", pd.DataFrame(runs[:2]), base, COMPANY)["interruption"]
    none = job_traits("pack", pd.DataFrame(runs[:1]), base, COMPANY)["interruption"]
    assert both.spread < one.spread < none.spread and none.source.startswith("prior")
    cheaper = [runs[0], run(1, 60.0, 19.0, SERVING)]  # by chance
    least = job_traits("pack", pd.DataFrame(cheaper), base, COMPANY)["interruption"]
    assert 0.01 < least.value < none.value
    # Where the load comes from elsewhere nobody meets it.
    there = {SERVING: COMPANY[SERVING]}
    assert job_traits("pack", pd.DataFrame(runs), base, there)["interruption"] == one


def test_jobs_that_never_rest_tell_what_the_load_generator_leaves() -> None:
    busy = [run(1, 20.01, 20.0), run(2, 11.01, 20.0), run(1, 50.01, 25.0, LOADED)]
    assert left_by_load(pd.DataFrame(busy), 1e5).vcpu == pytest.approx(0.5)
    # One that waits for its disk takes less than it is left.
    waits = [one | {"job": "copy"} for one in (run(1, 20.01, 8.0), run(1, 30.01, 9.0, LOADED))]
    assert left_by_load(pd.DataFrame([*busy, *waits]), 1e5).vcpu == pytest.approx(0.5)
    assert math.isnan(left_by_load(pd.DataFrame(busy[:2]), 1e5).vcpu)
    ended = pd.DataFrame([*busy[:2], run(1, math.nan, 25.0, LOADED)])
    assert math.isnan(left_by_load(ended, 1e5).vcpu)


def test_what_is_left_is_told_with_the_load_that_left_it() -> None:
    busy = [run(1, 20.01, 20.0), run(1, 50.01, 25.0, LOADED) | {"load_qps": 6e4}]
    assert left_by_load(pd.DataFrame(busy), 1e5).load == pytest.approx(0.6)
    old = pd.DataFrame(busy).drop(columns="load_qps")
    assert left_by_load(old, 1e5).load == left_by_load(old.iloc[:1], 1e5).load == SERVED


def test_the_cpu_time_of_an_instruction_comes_before_that_of_a_run() -> None:
    # The run beside memcached was stopped, so its CPU time is that of a part.
    alone = run(1, 20.0, 20.0, instructions=2e10)
    beside = run(1, math.nan, 6.5, SERVING, instructions=5e9)
    runs = pd.DataFrame([alone, beside])
    assert dearer_beside(SERVING, runs) == pytest.approx(1.3)
    assert math.isnan(dearer_beside(SERVING, runs.assign(instructions=math.nan)))
    # What a part has used is scaled up to the whole, what was counted in it is not.
    halved = runs.assign(sampled=[0.5, 1.0])
    assert dearer_beside(SERVING, halved) == pytest.approx(2.6)


def test_a_job_that_has_not_ended_is_longer_than_what_was_seen(base: Profile) -> None:
    work = job_traits("pack", pd.DataFrame([run(2, math.nan, 160.0)]), base, COMPANY)["work_s"]
    assert work.value > 160.0 and "160 s of CPU time did not end it" in work.source
    median, spread = generic_traits()["work_s"]
    assert work.spread < spread
    draws = np.exp(np.random.default_rng(0).normal(math.log(median), spread, 400_000))
    longer = np.log(draws[draws > 160.0])
    assert math.log(work.value) == pytest.approx(longer.mean(), abs=0.02)
    assert work.spread == pytest.approx(longer.std(), abs=0.02)


def test_a_job_that_was_never_run_is_what_the_profile_knows_or_any(base: Profile) -> None:
    nothing = pd.DataFrame([run(1, 1.0, 1.0)]).iloc[:0]
    known = base.jobs["zlib"]["work_s"].value
    assert job_traits("zlib", nothing, base, COMPANY)["work_s"].value == known
    any_job = job_traits("pack", nothing, base, COMPANY)
    assert any_job["work_s"].value == pytest.approx(generic_traits()["work_s"][0], rel=1e-3)
