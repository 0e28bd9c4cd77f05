"""Logged runs are played by the simulator's own physics: what it simulated comes back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from env.allocation import JobState, Weight, mask_of
from env.simulator import kernel
from env.simulator.machine import EpisodeFactory
from env.simulator.profile import load_profile
from env.simulator.sensing import sense
from tests.conftest import Rig
from tests.training.calibration.test_calibrate import occupancy, runs_of, write_tables
from training.calibration import fit_jobs as fitting
from training.calibration.job_states import build_states
from training.calibration.logs.traces import JobTrace, RunTrace
from training.calibration.replay import Replay, replay
from training.calibration.run_parameters import profile_physics

PROFILE = load_profile("cca-2025")
PHYSICS = profile_physics(PROFILE)


# --- replay and kernel ---------------------------------------------------------------------------


def decide(rig: Rig, rng: np.random.Generator, weight: Weight) -> None:
    """Start the next job where fewer than three run, and move or pause something."""
    row, jobs = rig.row, rig.scenario.jobs
    row["desired_service"] = mask_of(((0,), (0, 1), (0, 1, 2))[rng.integers(3)])
    row["desired_weight"] = int(weight)
    waiting = np.flatnonzero(row["job_state"] == JobState.PENDING)
    active = np.flatnonzero(np.isin(row["job_state"], (JobState.RUNNING, JobState.PAUSED)))
    if len(waiting) and len(active) < 3:
        job = int(waiting[0])
        row["desired_state"][job] = JobState.RUNNING
        row["desired_cores"][job] = rng.integers(1, 16)
        row["desired_threads"][job] = rng.choice(jobs[job].threads)
        row["desired_quota"][job] = rng.choice([0.7, 1.5, np.inf])
    for job in active:
        if rng.random() < 0.3:
            row["desired_cores"][job] = rng.integers(1, 16)
        paused = len(active) > 1 and rng.random() < 0.2
        row["desired_state"][job] = JobState.PAUSED if paused else JobState.RUNNING
    kernel.apply_desired(row, False)


def simulate(rig: Rig, seed: int, weight: Weight) -> tuple[RunTrace, np.ndarray]:
    """
    An episode of the simulator as a log of what was in force, and the ends of its jobs.

    The log's intervals carry the p95 that the kernel gave. It says where memcached was at every
    stop of the kernel, which notices the beginning of a backlog at its next stop only.
    """
    rng = np.random.default_rng(seed)
    rig.begin(seed, rng.choice([5e3, 60e3, 120e3, 200e3], 400).tolist())
    row, names = rig.row, rig.scenario.job_names
    service = [(0.0, int(row["true_service"]))]
    moves: list[list[tuple[float, int]]] = [[] for _ in names]
    pauses: list[list[tuple[float, float]]] = [[] for _ in names]
    ends_s, p95_us = [], []
    while not rig.done:
        decide(rig, rng, weight)
        for before, after in rig.events(float(row["now_s"]) + rng.uniform(1.0, 9.0)):
            now_s = float(after["now_s"])
            service.append((now_s, int(after["true_service"])))
            for job in range(len(names)):
                was, now = before["true_state"][job], after["true_state"][job]
                same = after["true_cores"][job] == before["true_cores"][job]
                if not same or (was, now) == (JobState.PENDING, JobState.RUNNING):
                    moves[job].append((now_s, int(after["true_cores"][job])))
                if (was, now) == (JobState.RUNNING, JobState.PAUSED):
                    pauses[job].append((now_s, np.inf))
                if (was, now) == (JobState.PAUSED, JobState.RUNNING):
                    pauses[job][-1] = (pauses[job][-1][0], now_s)
            if after["interval"] != before["interval"] or rig.done:
                ends_s.append(float(before["interval_ends_s"]))
                p95_us.append(kernel.interval_p95(row))
        sense(row)
    count = len(p95_us)
    jobs = [
        JobTrace(
            name,
            float(row["start_s"][job]),
            float(row["end_s"][job]),
            int(row["threads"][job]),
            tuple(moves[job]),
            tuple(pauses[job]),
            float(row["true_quota"][job]),
        )
        for job, name in enumerate(names)
    ]
    run = RunTrace(
        run="simulated",
        group="simulated",
        year=2025,
        day="",
        server="",
        interval_start_s=np.array(ends_s) - float(row["interval_s"]),
        interval_end_s=np.array(ends_s),
        qps=rig.targets[:count],
        p95_us=np.array(p95_us),
        service_threads=int(row["service_threads"]),
        service_moves=tuple(service),
        jobs=tuple(jobs),
        moves_logged=True,
        background=weight == Weight.BACKGROUND,
    )
    return run, row["end_s"].copy()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weight", Weight)
@pytest.mark.parametrize("closed", [False, True])
def test_a_simulated_episode_comes_back(
    calm: EpisodeFactory, seed: int, weight: Weight, closed: bool
) -> None:
    run, end_s = simulate(Rig(calm), seed, weight)
    assert any(job.pauses for job in run.jobs) and any(len(job.moves) > 1 for job in run.jobs)
    assert run.p95_us.max() > calm.scenario.service.slo_us  # memcached was overloaded at times
    played = replay(run, PHYSICS, closed, load_lag_s=0.0)
    np.testing.assert_array_equal(played.end_s, end_s)
    np.testing.assert_array_equal(played.p95_us[:-1], run.p95_us[:-1])
    # The kernel completes the last interval in other steps; the log gives pauses one by one.
    assert played.p95_us[-1] == pytest.approx(run.p95_us[-1], rel=1e-12)
    np.testing.assert_allclose(played.run_s, [job.run_s for job in run.jobs], rtol=1e-12)


# --- logged runs ---------------------------------------------------------------------------------


def played(run: RunTrace, closed: bool = False) -> Replay:
    return replay(run, PHYSICS, closed)


def test_open_replay_agrees_with_the_fit(tmp_path: Path) -> None:
    """Two codes, one physics. (The fit takes the mean over the logged duration, here too long.)"""
    (run,) = runs_of(write_tables(tmp_path)).runs
    states = build_states([run], occupancy)
    predicted = fitting.predict(states, PHYSICS.jobs, PHYSICS.host)
    np.testing.assert_allclose(played(run).run_s, predicted, rtol=0.15)


def test_closed_replay_chains_the_jobs(tmp_path: Path) -> None:
    (run,) = runs_of(write_tables(tmp_path)).runs
    closed = played(run, closed=True)
    for number, job in enumerate(run.jobs):
        before = run.predecessor(job)
        if before is not None:
            gap = job.start_s - before.end_s
            start = closed.end_s[number] - closed.run_s[number]
            waited = closed.end_s[run.jobs.index(before)] + gap
            paused = sum(b - a for a, b in job.pauses)
            assert start - paused - 1e-6 <= waited <= start + 1e-6


def test_pauses_stop_a_job(tmp_path: Path) -> None:
    (run,) = runs_of(write_tables(tmp_path)).runs
    canneal = next(job for job in run.jobs if job.name == "canneal")
    assert canneal.run_s == pytest.approx(canneal.end_s - canneal.start_s - 20.0)


def test_more_load_never_lowers_latency_in_a_replay(tmp_path: Path) -> None:
    (run,) = runs_of(write_tables(tmp_path)).runs
    calm = played(run).p95_us
    loaded = played(replace(run, qps=np.full(len(run.qps), 150e3))).p95_us
    assert (loaded >= calm - 1e-6).all() and np.isfinite(loaded).all()


def test_a_run_without_load_has_no_latency(tmp_path: Path) -> None:
    (run,) = runs_of(write_tables(tmp_path)).runs
    assert not played(replace(run, qps=np.zeros(len(run.qps)))).p95_us.any()
