"""Who decides when the policy cannot: a plain controller that is safe rather than fast."""

from agents.policy import unfinished
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.scenario import Scenario
from env.telemetry import Telemetry


class Fallback:
    """
    memcached gets its refuge; the jobs yield to it.

    Jobs run at background weight wherever sharing is allowed, else on the vCPUs that memcached
    never holds, else not at all. One job is started at a time, so that work goes on.

    :param scenario: the problem
    """

    def __init__(self, scenario: Scenario):
        self._names = scenario.job_names
        self._threads = {job.name: job.threads for job in scenario.jobs}
        self._refuge = scenario.service.core_choices[-1]
        everything = tuple(range(scenario.machine.vcpus))
        if scenario.regulation.share_service_cores:
            self._cores, self._weight = everything, Weight.BACKGROUND
        else:
            rest = tuple(core for core in everything if core not in self._refuge)
            self._cores, self._weight = rest, Weight.NORMAL

    def decide(self, telemetry: Telemetry) -> Allocation:
        """
        Keep memcached safe and what runs running.

        :param telemetry: what the machine shows
        """
        applied = telemetry.applied.jobs
        left = unfinished(telemetry, self._names)
        launched = [name for name in left if applied[name].state != JobState.PENDING]
        threads = {name: applied[name].threads for name in launched}
        if not launched and left and self._cores:
            fitting = [n for n in self._threads[left[0]] if n <= len(self._cores)]
            threads = {left[0]: fitting[-1] if fitting else self._threads[left[0]][0]}
        jobs = {
            name: JobAllocation(JobState.RUNNING, self._cores, self._weight, count)
            if self._cores
            else JobAllocation(JobState.PAUSED, applied[name].cores, applied[name].weight, count)
            for name, count in threads.items()
        }
        return Allocation(self._refuge, jobs)
