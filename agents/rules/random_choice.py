"""Anything that is legal."""

import random

from pydantic import NonNegativeInt

from agents.policy import Controller, Parameters, unfinished
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.scenario import Scenario
from env.telemetry import Telemetry


class RandomChoiceParameters(Parameters):
    """
    What is drawn.

    :param seed: seed of the draws; every episode draws the same sequence
    """

    seed: NonNegativeInt


class RandomChoice(Controller[RandomChoiceParameters]):
    """
    A draw from all legal allocations, each period: what any rule has to beat.

    memcached's set, and for each job state, vCPUs, weight and (at launch) threads are drawn
    evenly and independently.
    """

    schema = RandomChoiceParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self._random = random.Random(self.parameters.seed)

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Draw."""
        left = unfinished(telemetry, self.job_names)
        jobs = {job: self._draw(job, telemetry.applied.jobs[job]) for job in left}
        return Allocation(self._random.choice(self.scenario.service.core_choices), jobs)

    def _draw(self, job: str, now: JobAllocation) -> JobAllocation:
        draw = self._random
        pending = now.state == JobState.PENDING
        state = draw.choice((JobState.PENDING if pending else JobState.PAUSED, JobState.RUNNING))
        subset = draw.randrange(1, 2 ** len(self.vcpus))
        cores = tuple(core for core in self.vcpus if subset >> core & 1)
        threads = draw.choice(self.thread_choices[job]) if pending else now.threads
        return JobAllocation(state, cores, draw.choice(tuple(Weight)), threads)
