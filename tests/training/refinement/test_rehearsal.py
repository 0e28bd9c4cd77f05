"""What a rehearsal runs, and what it says of a profile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

import agents
from deploy.records.predicted import Figures, Prediction
from env.scenario import Scenario, load_scenario
from env.simulator.profile import Profile, load_profile
from training.refinement.live_replay import LiveReplay
from training.refinement.live_run import read_live_run
from training.refinement.rehearsal import (
    DONE_PER_VCPU,
    FOREIGN_LIMIT,
    LIMITS,
    RUN_S,
    _rule,
    corrected,
    judge,
    rehearsed,
)


def figures(**changes: Any) -> Figures:
    usual: dict[str, Any] = {
        "makespan_s": 30.0,
        "violation_ratio": 0.02,
        "intervals": 15.0,
        "p95_median_us": 500.0,
        "p95_high_us": 900.0,
        "shared_p95_us": None,
        "apart_p95_us": None,
        "changes_per_min": 10.0,
        "guard_steps": 0.0,
        "jobs": {"cpu": 10.0, "zlib": 20.0},
    }
    return Figures(**(usual | changes))


def prediction(**measured: Any) -> Prediction:
    seen = figures(**measured)
    return Prediction(profile="p", measured=seen, replayed=None, free=figures(), remarks=[])


def sure(profile: Profile, spread: float) -> Profile:
    """The profile with as wide a spread of all jobs' work."""
    jobs = {
        name: traits | {"work_s": traits["work_s"].model_copy(update={"spread": spread})}
        for name, traits in profile.jobs.items()
    }
    return profile.model_copy(update={"jobs": jobs})


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load_scenario("local")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return sure(load_profile("local"), 0.05)


def said(
    found: Prediction,
    scenario: Scenario,
    profile: Profile,
    lasted_s: float = 30.0,
    foreign: float = 0.0,
) -> dict[str, str]:
    verdicts = judge(found, lasted_s, foreign, scenario, profile)
    assert [one.prediction for one in verdicts] == list(LIMITS)
    return {one.prediction: str(one).removeprefix(f"{one.prediction}: ") for one in verdicts}


def test_what_is_near_is_good_enough(scenario: Scenario, profile: Profile) -> None:
    found = said(prediction(makespan_s=32.0), scenario, profile)
    assert all(text.startswith("good enough") for text in found.values())
    assert "predicted 30.0 s, measured 32.0 s" in found["makespan"]


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("makespan", {"makespan_s": 36.0}),
        ("violations", {"violation_ratio": 0.08}),
        ("p95", {"p95_median_us": 390.0}),
        ("job times", {"jobs": {"cpu": 10.0, "zlib": 14.0}}),
    ],
)
def test_what_is_far_off_is_not(
    what: str, changes: dict[str, Any], scenario: Scenario, profile: Profile
) -> None:
    found = said(prediction(**changes), scenario, profile)
    assert [name for name, text in found.items() if text.startswith("NOT good")] == [what]


def test_jobs_that_were_not_rehearsed_must_be_known_for_a_makespan(
    scenario: Scenario, profile: Profile
) -> None:
    found = said(prediction(), scenario, sure(profile, 0.8))
    assert found["makespan"].startswith("NOT good enough")
    assert found["job times"].startswith("good enough")


def test_what_a_rehearsal_cannot_say_is_not_known(scenario: Scenario, profile: Profile) -> None:
    found = prediction(makespan_s=None, jobs={"cpu": None, "zlib": None})
    unfinished = said(found, scenario, profile, lasted_s=28.0)
    assert unfinished["makespan"].startswith("not known (predicted 30.0 s, measured none")
    assert unfinished["job times"].startswith("not known (cpu has ended in only one")
    assert unfinished["violations"].startswith("good enough")
    blind = prediction().model_copy(update={"free": None, "remarks": ["the policy is gone"]})
    assert set(said(blind, scenario, profile).values()) == {"not known (the policy is gone)"}


def test_nothing_is_judged_where_others_used_the_machine(
    scenario: Scenario, profile: Profile
) -> None:
    verdicts = said(prediction(), scenario, profile, foreign=0.3)
    assert all(text.startswith("not known (other processes used 30%") for text in verdicts.values())


def test_a_share_of_too_few_measured_intervals_is_not_known(
    scenario: Scenario, profile: Profile
) -> None:
    """However long the run took: what counts is the intervals that have a p95."""
    found = said(prediction(makespan_s=None, intervals=3.0), scenario, profile, lasted_s=57.0)
    assert found["violations"].startswith("not known")
    assert "3 intervals are too few" in found["violations"]


def test_a_job_that_has_ended_in_only_one_of_the_two_is_not_passed_over(
    scenario: Scenario, profile: Profile
) -> None:
    near = said(prediction(jobs={"cpu": 10.0, "zlib": None}), scenario, profile)["job times"]
    assert near.startswith("not known (zlib has ended in only one of the two: predicted 20.0 s")
    far = said(prediction(jobs={"cpu": 30.0, "zlib": None}), scenario, profile)["job times"]
    assert far.startswith("NOT good enough (cpu the farthest off")
    idle = figures(jobs={"cpu": None, "zlib": None})
    none = prediction().model_copy(update={"free": idle, "measured": idle})
    assert said(none, scenario, profile)["job times"] == "not known (no job has ended)"


def test_nothing_is_relative_to_zero_or_to_what_is_no_number(
    scenario: Scenario, profile: Profile
) -> None:
    found = prediction(p95_median_us=0.0)
    free = figures().model_copy(update={"makespan_s": math.nan, "violation_ratio": math.nan})
    verdicts = said(found.model_copy(update={"free": free}), scenario, profile)
    unknown = {name for name, text in verdicts.items() if text.startswith("not known")}
    assert unknown == {"makespan", "violations", "p95"}


def test_a_run_that_was_stopped_after_more_than_was_predicted_says_so(
    scenario: Scenario, profile: Profile
) -> None:
    found = said(prediction(makespan_s=None), scenario, profile, lasted_s=57.0)["makespan"]
    assert found.startswith("NOT good enough (predicted 30.0 s, measured more than 57.0 s")


def test_a_profile_learns_from_a_rehearsal_that_others_left_alone(profile: Profile) -> None:
    run = read_live_run(Path(__file__).with_name("run"))
    assert corrected(profile, run, FOREIGN_LIMIT + 0.01) == profile
    learned, replay = corrected(profile, run, 0.0), LiveReplay(run)
    measured_s = sum(job.run_s for job in run.trace.jobs)
    before_s, after_s = (replay.play(one, False).run_s.sum() for one in (profile, learned))
    assert abs(after_s - measured_s) < 0.5 * abs(before_s - measured_s)


def test_a_rehearsal_has_the_shortest_jobs_and_one_at_least(
    scenario: Scenario, profile: Profile, tmp_path: Path
) -> None:
    work_s = {name: traits["work_s"].value for name, traits in profile.jobs.items()}

    def longer(factor: float) -> list[str]:
        jobs = {
            name: traits
            | {"work_s": traits["work_s"].model_copy(update={"value": factor * work_s[name]})}
            for name, traits in profile.jobs.items()
        }
        return [job.name for job in rehearsed(scenario, profile.model_copy(update={"jobs": jobs}))]

    by_length = sorted(work_s, key=work_s.__getitem__)
    budget_s = 0.999 * RUN_S * DONE_PER_VCPU * scenario.machine.vcpus
    assert longer(budget_s / sum(work_s.values())) == by_length
    some = longer(budget_s / sum(sorted(work_s.values())[:3]))
    assert some == by_length[:3]
    assert longer(1000.0) == by_length[:1]
    for names in (by_length, some, by_length[:1]):
        part = scenario.with_jobs([job for job in scenario.jobs if job.name in names])
        (tmp_path / "rule.yaml").write_text(yaml.safe_dump(_rule(part.jobs)))
        agents.make(tmp_path / "rule.yaml").reset(part)
