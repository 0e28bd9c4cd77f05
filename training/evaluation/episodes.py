"""Episodes of any policy in the simulator."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from agents.policy import Policy
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from training.evaluation.timeline import IntervalRecorder


@dataclass(frozen=True)
class EpisodeStart:
    """
    What an episode follows from: its load trace and the source of all other random numbers.

    :param trace_seed: mcperf's seed
    :param entropy: with the trace seed, the seed of the episode's random numbers
    """

    trace_seed: int
    entropy: int

    def rng(self) -> np.random.Generator:
        """A fresh source of the episode's random numbers."""
        return np.random.default_rng([self.entropy, self.trace_seed])


@dataclass(frozen=True)
class Run:
    """
    One finished episode of one policy.

    :param seed: mcperf's seed
    :param summary: see `env.simulator.machine.episode_summary`
    :param error: why the policy was stopped, and when; empty if it was not
    """

    seed: int
    summary: dict[str, Any]
    error: str = ""

    @property
    def completed(self) -> bool:
        """Whether all jobs were done before the time cap."""
        return bool(self.summary["completed"]) and not self.error

    @property
    def makespan_s(self) -> float:
        """From the first job's start to the last job's end; the time cap if not completed."""
        return float(self.summary["makespan_s"])

    @property
    def jct_s(self) -> list[float]:
        """Each job's time from its arrival to its end; to the time cap if it was not done."""
        cap_s = float(self.summary["duration_s"])
        jobs = self.summary["jobs"].values()
        return [
            (cap_s if job["end_s"] is None or self.error else job["end_s"]) - job["arrival_s"]
            for job in jobs
        ]

    @property
    def mean_jct_s(self) -> float:
        """Mean job completion time."""
        return float(np.mean(self.jct_s))

    @property
    def p95_jct_s(self) -> float:
        """95th percentile of the jobs' completion times."""
        return float(np.quantile(self.jct_s, 0.95))

    @property
    def mean_slowdown(self) -> float:
        """Mean ratio of a job's completion time to what it takes alone on the machine."""
        alone_s = [job["alone_s"] for job in self.summary["jobs"].values()]
        return float(np.mean(np.divide(self.jct_s, alone_s)))

    @property
    def violation_ratio(self) -> float:
        """Share of the measurement intervals in the batch window with p95 above the SLO."""
        return float(self.summary["violation_ratio"])

    @property
    def actuations_per_min(self) -> float:
        """Changes sent to the actuator."""
        return 60.0 * float(self.summary["actuations"]) / max(1.0, self.makespan_s)

    @property
    def pauses_per_min(self) -> float:
        """Pauses of the job that was paused most."""
        most = max(int(job["pauses"]) for job in self.summary["jobs"].values())
        return 60.0 * most / max(1.0, self.makespan_s)


def starts_from(entropy: int, episodes: int) -> list[EpisodeStart]:
    """
    Traces for a report.

    :param entropy: the evaluation's seed
    :param episodes: number of episodes
    """
    return [EpisodeStart(seed, entropy) for seed in trace_seeds(entropy, episodes, "report")]


def repeats_of(trace_seed: int, entropy: int, episodes: int) -> list[EpisodeStart]:
    """
    The same trace again and again, everything else drawn anew each time.

    :param trace_seed: mcperf's seed
    :param entropy: the evaluation's seed
    :param episodes: number of episodes
    """
    return [EpisodeStart(trace_seed, entropy + repeat) for repeat in range(episodes)]


def run_episode(
    machine: SimulatedMachine,
    policy: Policy,
    start: EpisodeStart,
    regulated: bool = True,
    recorder: IntervalRecorder | None = None,
    probed: bool = True,
) -> Run:
    """
    Let a policy decide until all jobs are done or the time is up.

    The first decision comes at a random phase of the policy's period: nothing synchronises a
    controller with the load. A policy that raises or wants what the machine cannot hold is
    stopped there, and the run counts as not completed.

    :param machine: the simulated machine to run on
    :param policy: who decides
    :param start: the episode to run
    :param regulated: whether the regulator may stand in between
    :param recorder: receives what there is to show of it
    :param probed: whether there is a latency probe for policies that ask for one
    """
    rng = start.rng()
    machine.begin(start.trace_seed, rng)
    regulator_on = regulated and policy.regulated
    error = ""
    try:
        policy.reset(machine.scenario)
        machine.probe(policy.probe_window_s, probed)
        advance = machine.advance if recorder is None else partial(recorder.advance, machine)
        advance(float(rng.random()) * policy.period_s, False)
        while not machine.over:
            telemetry = machine.telemetry()
            machine.apply(policy.decide(telemetry), regulator_on)
            advance(telemetry.time_s + policy.period_s, policy.wakes)
    except Exception as fault:
        error = f"at {machine.host.now_s:.3f} s: {type(fault).__name__}: {fault}"
    if recorder is not None:
        recorder.finish(machine)
    summary = machine.summary()
    if error:
        summary |= {"completed": False, "makespan_s": machine.scenario.load.duration_s}
    return Run(start.trace_seed, summary, error)


def run_episodes(
    policy: Policy,
    factory: EpisodeFactory,
    starts: Iterable[EpisodeStart],
    regulated: bool = True,
) -> list[Run]:
    """
    One run per start.

    :param policy: who decides
    :param factory: what the episodes look like
    :param starts: the episodes to run
    :param regulated: whether the regulator may stand in between
    """
    machine = SimulatedMachine(factory)
    return [run_episode(machine, policy, start, regulated) for start in starts]
