"""
The search for a plan: simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) over the simulator.

A candidate is a sequence of jobs, each with a node and vCPUs. A job waits for the earlier ones that
have vCPUs in common with it, unless it is told to share them. Only the nodes that a change touches
are simulated again. A plan is evaluated by its mean makespan over draws of the nodes' speeds.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from env.cluster.cluster_scenario import ClusterScenario
from env.cluster.plan import ClusterPlan, JobPlace, ServicePlace, most_memory, predecessors
from training.placement.plan_simulation import ClusterSimulator, FloatArray

DRAWS = 8
"""Draws of the speeds that a candidate is evaluated by while the search goes on."""

VIOLATION_COST_S = 50.0
"""What an interval over the SLO costs while the search goes on; its result has none."""

IDLE_COST = 0.02
"""Of the seconds that each node is busy, so that nodes beside the longest get shorter, too."""

FIRST_TEMPERATURE_S, LAST_TEMPERATURE_S = 15.0, 0.2


@dataclass(frozen=True)
class Placed:
    """
    One job of a candidate.

    :param name: the job
    :param node: its node
    :param vcpus: its vCPUs
    :param shares: it does not wait for the earlier jobs on its vCPUs
    """

    name: str
    node: str
    vcpus: tuple[int, ...]
    shares: bool = False


@dataclass(frozen=True)
class Candidate:
    """
    A plan as the search varies it.

    :param service_node: memcached's node; it has the first vCPUs of that
    :param jobs: the jobs in their order
    """

    service_node: str
    jobs: tuple[Placed, ...]


class PlanSearch:
    """
    One run of the annealing.

    :param cluster: the problem
    :param seed: what the search follows from
    """

    def __init__(self, cluster: ClusterScenario, seed: int):
        self.cluster = cluster
        self.simulator = ClusterSimulator(cluster, DRAWS)
        self.rng = np.random.default_rng([seed, len(cluster.jobs)])
        self._known: dict[object, tuple[FloatArray, float]] = {}

    def anneal(self, candidate: Candidate, evaluations: int) -> tuple[float, Candidate]:
        """
        Improve a candidate.

        :param candidate: where the search begins
        :param evaluations: candidates to try
        :return: the least cost found, and its candidate
        """
        present = best = self.cost(candidate)
        found = candidate
        cooling = (LAST_TEMPERATURE_S / FIRST_TEMPERATURE_S) ** (1.0 / evaluations)
        temperature = FIRST_TEMPERATURE_S
        for _ in range(evaluations):
            varied = self.neighbour(candidate)
            cost = self.cost(varied)
            if cost <= present or self.rng.random() < math.exp((present - cost) / temperature):
                candidate, present = varied, cost
                if cost < best:
                    best, found = cost, varied
            temperature *= cooling
        return best, found

    def cost(self, candidate: Candidate) -> float:
        """
        What the search makes small; infinite where memory does not suffice or jobs do not end.

        :param candidate: what to evaluate
        """
        plan = as_plan(candidate, self.cluster)
        before = predecessors(plan.jobs)
        ends = np.zeros((len(self.cluster.node_names), DRAWS))
        violations = 0.0
        for index, node in enumerate(self.cluster.node_names):
            places = plan.on(node)
            serves = plan.service if node == plan.service.node else None
            if not places and not serves:
                continue
            key = node, serves, places
            if key not in self._known:
                room = self.cluster.type_of(node).machine.memory_mib
                room -= self.cluster.service.memory_mib if serves else 0
                if most_memory(places, before, self.cluster) > room:
                    self._known[key] = np.full(DRAWS, math.inf), 0.0
                else:
                    hosts = self.simulator.run_places(node, serves, places)
                    own = [self.cluster.job_names.index(place.name) for place in places]
                    end_s = hosts["end_s"][:, own].max(axis=1, initial=0.0)
                    broken = hosts["violations"].sum() / DRAWS if serves else 0.0
                    self._known[key] = end_s, float(broken)
            ends[index], broken = self._known[key]
            violations += broken
        makespan = float(ends.max(axis=0).mean())
        return makespan + VIOLATION_COST_S * violations + IDLE_COST * float(ends.mean())

    def neighbour(self, candidate: Candidate) -> Candidate:
        """
        A candidate that differs in one thing.

        :param candidate: what to vary; it stays as it is
        """
        rng, jobs = self.rng, list(candidate.jobs)
        which, what = int(rng.integers(len(jobs))), rng.random()
        if what < 0.25:
            other = int(rng.integers(len(jobs)))
            jobs[which], jobs[other] = jobs[other], jobs[which]
        elif what < 0.4:  # two jobs change places
            other = int(rng.integers(len(jobs)))
            one, two = jobs[which], jobs[other]
            jobs[which] = replace(one, node=two.node, vcpus=two.vcpus)
            jobs[other] = replace(two, node=one.node, vcpus=one.vcpus)
        elif what < 0.5:
            jobs[which] = replace(jobs[which], shares=not jobs[which].shares)
        elif what < 0.55 and not self.cluster.service.node:
            return self._serving(str(rng.choice(self.cluster.node_names)), candidate)
        else:
            node = jobs[which].node
            if what < 0.8:
                node = str(rng.choice(self.cluster.node_names))
            free = free_vcpus(node, candidate.service_node, self.cluster)
            if free:
                count = int(rng.integers(1, len(free) + 1))
                vcpus = rng.choice(free, size=count, replace=False).tolist()
                jobs[which] = replace(jobs[which], node=node, vcpus=tuple(sorted(vcpus)))
        return Candidate(candidate.service_node, tuple(jobs))

    def _serving(self, node: str, candidate: Candidate) -> Candidate:
        """The candidate with memcached elsewhere; jobs leave its vCPUs."""
        jobs = []
        for job in candidate.jobs:
            free = free_vcpus(job.node, node, self.cluster)
            kept = tuple(vcpu for vcpu in job.vcpus if vcpu in free) or tuple(free)
            if not kept:
                return candidate
            jobs.append(replace(job, vcpus=kept))
        return Candidate(node, tuple(jobs))


def free_vcpus(node: str, service_node: str, cluster: ClusterScenario) -> list[int]:
    """
    The vCPUs that jobs may have on a node.

    :param node: its name
    :param service_node: memcached's node
    :param cluster: the problem
    """
    taken = cluster.service.threads if node == service_node else 0
    return list(range(cluster.type_of(node).machine.vcpus))[taken:]


def in_turn(cluster: ClusterScenario, service_node: str) -> Candidate:
    """
    Where the search begins: each job on all vCPUs of the node with the most, one after another.

    :param cluster: the problem
    :param service_node: memcached's node
    """
    node = max(cluster.node_names, key=lambda one: len(free_vcpus(one, service_node, cluster)))
    vcpus = tuple(free_vcpus(node, service_node, cluster))
    return Candidate(service_node, tuple(Placed(name, node, vcpus) for name in cluster.job_names))


def as_plan(candidate: Candidate, cluster: ClusterScenario) -> ClusterPlan:
    """
    A candidate as a plan.

    :param candidate: the candidate
    :param cluster: the problem
    """
    places: list[JobPlace] = []
    for job in candidate.jobs:
        allowed = cluster.job(job.name).threads
        # Threads without a vCPU cost next to nothing, a vCPU without a thread is lost.
        threads = next((one for one in allowed if one >= len(job.vcpus)), allowed[-1])
        after = tuple(
            other.name
            for other in places
            if other.node == job.node and set(other.vcpus) & set(job.vcpus) and not job.shares
        )
        places.append(
            JobPlace(name=job.name, node=job.node, vcpus=job.vcpus, threads=threads, after=after)
        )
    service = ServicePlace(
        node=candidate.service_node,
        vcpus=tuple(range(cluster.service.threads)),
        threads=cluster.service.threads,
    )
    return ClusterPlan(name="planned", scenario=cluster.name, service=service, jobs=tuple(places))
