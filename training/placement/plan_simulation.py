"""
A plan run in the simulator: each node is a host of the kernel, as on one machine.

A node without memcached is one whose memcached gets a request a second. No regulator stands in
between: what a plan says is what Kubernetes runs. Nodes meet only where a job waits for one of
another node; such a start is passed on as a time, until no time changes any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from env.allocation import mask_of
from env.cluster.cluster_scenario import ClusterScenario, NodeType
from env.cluster.plan import ClusterPlan, JobPlace, ServicePlace
from env.codes import NORMAL
from env.physics.parameters import JOB_SPEED
from env.physics.service import VM_SPEED
from env.scenario import FAMILY_ROOM, MAX_JOBS, Control, Load, Scenario, Service
from env.simulator.machine import EpisodeFactory
from env.simulator.profile import Parameter, Profile, load_profile
from training.placement.node_kernel import run_node_at

FloatArray = npt.NDArray[np.float64]

WATCH_S = 0.1
"""How long a job's end takes to reach who watches the cluster."""

IDLE_QPS = 1
"""What memcached serves on a node that has none [requests/s]."""


@dataclass(frozen=True)
class PlanRuns:
    """
    A plan's runs, one for each draw of what is not known.

    :param start_s: float64[draws, J], when each job started
    :param end_s: float64[draws, J], when it ended; infinite if it did not
    :param violations: int64[draws], intervals over the SLO before the last job's end
    :param intervals: int64[draws], all of those
    """

    start_s: FloatArray
    end_s: FloatArray
    violations: npt.NDArray[np.int64]
    intervals: npt.NDArray[np.int64]

    @property
    def makespans(self) -> FloatArray:
        """From the first start to the last end, of each draw [s]."""
        return np.asarray(self.end_s.max(axis=1) - self.start_s.min(axis=1))

    @property
    def violation_ratio(self) -> float:
        """Share of the intervals over the SLO."""
        return float(self.violations.sum() / max(1, self.intervals.sum()))


class ClusterSimulator:
    """
    Runs plans, each under the same draws of the node types' speeds.

    :param cluster: the problem
    :param draws: how many, spread evenly over each speed's distribution; one draw is the speeds as
        they are stated
    """

    def __init__(self, cluster: ClusterScenario, draws: int = 1):
        self.cluster, self.draws = cluster, draws
        self.profile = load_profile(cluster.profile)
        self._begun: dict[Any, tuple[Any, FloatArray]] = {}
        self._at_once = np.zeros((draws, MAX_JOBS))

    def run(self, plan: ClusterPlan) -> PlanRuns:
        """
        Run a plan that fits the cluster.

        :param plan: the plan
        """
        names = self.cluster.job_names
        not_before_s = self._at_once
        for _ in range(len(names) + 1):
            runs = self._run_once(plan, not_before_s)
            told_s = np.zeros_like(not_before_s)
            for place in plan.jobs:
                for other in map(plan.job, place.after):
                    if other.node != place.node:
                        job, before = names.index(place.name), names.index(other.name)
                        end_s = runs.end_s[:, before] + WATCH_S
                        told_s[:, job] = np.maximum(told_s[:, job], end_s)
            if (told_s == not_before_s).all():
                return runs
            not_before_s = told_s
        raise AssertionError("a plan without a circle settles in as many rounds as it has jobs")

    def _run_once(self, plan: ClusterPlan, not_before_s: FloatArray) -> PlanRuns:
        n_jobs = len(self.cluster.jobs)
        start_s, end_s = np.zeros((2, self.draws, n_jobs))
        nodes = [node for node in self.cluster.node_names if node != plan.service.node]
        for node in (*nodes, plan.service.node):
            places = plan.on(node)
            serves = plan.service if node == plan.service.node else None
            hosts = self.run_places(
                node, serves, places, not_before_s, end_s.max(axis=1) if serves else None
            )
            own = [self.cluster.job_names.index(place.name) for place in places]
            start_s[:, own] = hosts["start_s"][:, own]
            end_s[:, own] = hosts["end_s"][:, own]
        return PlanRuns(start_s, end_s, hosts["violations"], hosts["intervals"])

    def run_places(
        self,
        node: str,
        serves: ServicePlace | None,
        places: Sequence[JobPlace],
        not_before_s: FloatArray | None = None,
        serve_until_s: FloatArray | None = None,
    ) -> Any:
        """
        Run what is placed on one node.

        :param node: its name
        :param serves: memcached's place, if it is there
        :param places: the jobs there
        :param not_before_s: float64[draws, MAX_JOBS], see `run_node`; 0 if not given
        :param serve_until_s: float64[draws], see `run_node`; 0 if not given
        :return: the hosts at their ends, one for each draw
        """
        kind = self.cluster.type_of(node)
        before, targets = self._begin(kind, serves)
        hosts = before.copy()
        names = self.cluster.job_names
        indices = {place.name: names.index(place.name) for place in places}
        waits = np.zeros(MAX_JOBS, np.int64)
        for place in places:
            index = indices[place.name]
            hosts["desired_threads"][:, index] = place.threads
            hosts["desired_cores"][:, index] = mask_of(place.vcpus)
            waits[index] = mask_of(tuple(indices[one] for one in place.after if one in indices))
        own = mask_of(tuple(indices.values()))
        if serves:  # the first jobs have started somewhere, so intervals count
            hosts["start_s"][:, [job for job in range(MAX_JOBS) if not own >> job & 1]] = 0.0
        not_before_s = self._at_once if not_before_s is None else not_before_s
        until_s = np.zeros(self.draws) if serve_until_s is None else serve_until_s
        for draw in range(self.draws):
            run_node_at(hosts, draw, targets[draw], own, waits, not_before_s[draw], until_s[draw])
        return hosts

    def _begin(self, kind: NodeType, serves: ServicePlace | None) -> tuple[Any, FloatArray]:
        """The hosts of one type at their start, with and without memcached, made once."""
        key = kind.name, serves and (serves.vcpus, serves.threads)
        if key not in self._begun:
            scenario = node_scenario(self.cluster, kind, serves)
            profile = node_profile(self.profile, self.cluster, kind)
            # One compiled kernel serves nodes of every size.
            factory = EpisodeFactory(scenario, profile, room=FAMILY_ROOM)
            hosts, targets = factory.new_hosts(self.draws), factory.new_targets(self.draws)
            for draw in range(self.draws):
                factory.begin(hosts, targets, draw, 1, np.random.default_rng([0, draw]))
            for index, (field, column, speed) in enumerate(
                (
                    ("host_params", JOB_SPEED, kind.job_speed),
                    ("service_params", VM_SPEED, kind.service_speed),
                )
            ):
                off = self._drawn(self.cluster.nodes.index(kind), index)
                hosts[field][:, column] *= np.exp(speed.spread * off)
            hosts["desired_weight"] = NORMAL
            self._begun[key] = hosts, targets
        return self._begun[key]

    def _drawn(self, kind: int, which: int) -> FloatArray:
        """One normal number for each draw: the distribution's quantiles, in an order of its own."""
        rng = np.random.default_rng([0, kind, which])
        levels = (rng.permutation(self.draws) + 0.5) / self.draws
        return np.array([NormalDist().inv_cdf(level) for level in levels])


def node_scenario(
    cluster: ClusterScenario, kind: NodeType, serves: ServicePlace | None
) -> Scenario:
    """
    One node as a machine of its own.

    :param cluster: the problem
    :param kind: the node's type
    :param serves: memcached's place there, if it is there
    """
    load = cluster.service.load
    if serves is None:
        load = Load(
            qps_min=IDLE_QPS,
            qps_max=IDLE_QPS,
            interval_s=load.duration_s,
            duration_s=load.duration_s,
        )
    # What fits is checked with the plan: not all jobs are on each node.
    memory_mib = max(job.memory_mib for job in cluster.jobs)
    return Scenario(
        name=kind.name,
        description=kind.description,
        profile=cluster.profile,
        machine=kind.machine.model_copy(update={"memory_mib": memory_mib}),
        service=Service(
            threads=serves.threads if serves else 1,
            slo_us=cluster.service.slo_us,
            core_choices=(tuple(sorted(serves.vcpus)) if serves else (0,),),
        ),
        jobs=cluster.jobs,
        load=load,
        control=Control(period_s=WATCH_S, hold_s=WATCH_S, wake_qps=float(load.qps_max)),
    )


def node_profile(profile: Profile, cluster: ClusterScenario, kind: NodeType) -> Profile:
    """
    The profile of a type of nodes.

    :param profile: the VM's that all speeds are relative to
    :param cluster: says how long a container takes to start
    :param kind: the nodes' type
    """

    def factor(parameter: Parameter, value: float) -> Parameter:
        return parameter.model_copy(update={"value": parameter.value * value})

    host, service = profile.host, profile.service
    start = Parameter(value=cluster.pod_start_s, spread=0.0, unit="s", source=cluster.name)
    return profile.model_copy(
        update={
            "siblings": (),
            "host": host
            | {
                "job_speed": factor(host["job_speed"], kind.job_speed.value),
                "gate_latency_s": start,
            },
            "service": service
            | {"vm_speed": factor(service["vm_speed"], kind.service_speed.value)},
        }
    )
