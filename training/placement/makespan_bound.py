"""
A makespan that no plan beats, at the speeds as they are stated.

A job takes at least what it takes alone on a whole node, and the jobs of a node take at least what
they ask of its vCPUs. Which job is on which node is left to a mixed-integer program (HiGHS), which
knows nothing of order, of interference, or of vCPUs that idle.
"""

import math

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from env.cluster.cluster_scenario import ClusterScenario
from env.cluster.plan import JobPlace, ServicePlace
from env.physics.parameters import CORES_PER_THREAD, JOB_SPEED, SERIAL_FRACTION, SMT, WORK_S
from env.scenario import Job
from training.placement.plan_search import free_vcpus
from training.placement.plan_simulation import ClusterSimulator


def makespan_bound(cluster: ClusterScenario) -> float:
    """
    The bound, over all nodes that memcached may be on [s].

    :param cluster: the problem
    """
    nodes = (cluster.service.node,) if cluster.service.node else cluster.node_names
    simulator = ClusterSimulator(cluster)
    return min(_bound_with(simulator, node) for node in nodes)


def _bound_with(simulator: ClusterSimulator, service_node: str) -> float:
    """The bound with memcached on one node [s]; infinite if the jobs do not fit then."""
    cluster = simulator.cluster
    names, jobs = cluster.node_names, cluster.jobs
    alone_s = np.full((len(jobs), len(names)), math.inf)
    vcpu_s = np.zeros_like(alone_s)
    room = np.array([len(free_vcpus(node, service_node, cluster)) for node in names])
    for at, node in enumerate(names):
        for index, job in enumerate(jobs):
            if room[at] and _fits(cluster, job, node, service_node):
                alone_s[index, at] = _alone_s(simulator, job, node, service_node)
                vcpu_s[index, at] = _least_vcpu_s(simulator, job, node, node == service_node)
    possible = np.isfinite(alone_s)
    if not possible.any(axis=1).all():
        return math.inf
    # One variable for each job and node, and the makespan last.
    count = alone_s.size
    one_node = np.zeros((len(jobs), count + 1))
    node_busy = np.zeros((len(names), count + 1))
    job_takes = np.zeros((len(jobs), count + 1))
    for index in range(len(jobs)):
        own = slice(index * len(names), (index + 1) * len(names))
        one_node[index, own] = 1.0
        job_takes[index, own] = np.where(possible[index], alone_s[index], 0.0)
        node_busy[:, own] = np.diag(vcpu_s[index])
    node_busy[:, -1], job_takes[:, -1] = -room, -1.0
    found = milp(
        np.append(np.zeros(count), 1.0),
        integrality=np.append(np.ones(count), 0.0),
        bounds=Bounds(0.0, np.append(possible.ravel().astype(float), math.inf)),
        constraints=[
            LinearConstraint(one_node, 1.0, 1.0),
            LinearConstraint(np.vstack([node_busy, job_takes]), -math.inf, 0.0),
        ],
    )
    return float(found.fun)


def _fits(cluster: ClusterScenario, job: Job, node: str, service_node: str) -> bool:
    room = cluster.type_of(node).machine.memory_mib
    return job.memory_mib + (node == service_node) * cluster.service.memory_mib <= room


def _alone_s(simulator: ClusterSimulator, job: Job, node: str, service_node: str) -> float:
    """What a job takes on all free vCPUs of a node, simulated [s]."""
    cluster = simulator.cluster
    index = cluster.job_names.index(job.name)
    vcpus = tuple(free_vcpus(node, service_node, cluster))
    count = cluster.service.threads
    serves = None
    if node == service_node:
        serves = ServicePlace(node=node, vcpus=tuple(range(count)), threads=count)
    least = math.inf
    for threads in job.threads:
        place = JobPlace(name=job.name, node=node, vcpus=vcpus, threads=threads)
        host = simulator.run_places(node, serves, (place,))[0]
        least = min(least, float(host["end_s"][index] - host["start_s"][index]))
    return least


def _least_vcpu_s(simulator: ClusterSimulator, job: Job, node: str, serves: bool) -> float:
    """
    VCPU time that a job takes of a node at least, its idle siblings' time included [s].

    By `env.physics.jobs`, a job that keeps m vCPUs busy in its parallel part has
    d = 1 / (s + (1 - s) / m) of them on average, and each of its seconds takes
    s + (1 - s) k / (m v): s is its serial fraction, k the vCPUs that a thread keeps busy, v what a
    vCPU is worth. That is its SMT factor beside a busy sibling, and 1 where the sibling idles (then
    two vCPUs are gone) or is memcached's.
    """
    kind, profile = simulator.cluster.type_of(node), simulator.profile
    traits = profile.job_array((job.name,))[0]
    speed = profile.host_array()[JOB_SPEED] * kind.job_speed.value
    serial, per_thread, smt = traits[[SERIAL_FRACTION, CORES_PER_THREAD, SMT]]
    paired = bool(kind.machine.smt_siblings)
    least = math.inf
    for threads in job.threads:
        wide = min(threads * per_thread, kind.machine.vcpus)
        held = 1.0 / (serial + (1.0 - serial) / wide)
        idle = held * (serial + (1.0 - serial) * per_thread / wide)
        busy = held * (serial + (1.0 - serial) * per_thread / (wide * smt))
        least = min(least, min(busy, 2.0 * idle) if paired and not serves else idle)
    return float(traits[WORK_S] / speed * least)
