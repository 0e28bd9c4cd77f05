"""
How much an endless best-effort load gets done, compared with running alone on the machine.

Scenarios whose jobs never end have no makespan. As the thesis of 2020 on Intel PRM does (section
5.1.5), they are judged by the QoS guarantee, the share of samples within the target, and by the
best-effort throughput.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from env.allocation import Weight
from env.physics.jobs import job_speeds
from env.scenario import Scenario
from env.simulator.profile import Profile
from training.evaluation.episodes import Run


def speed_alone(scenario: Scenario, profile: Profile) -> float:
    """
    Work per second that the jobs get done without memcached [s alone on one vCPU / s].

    :param scenario: whose jobs, each with its most threads on all vCPUs
    :param profile: the fitted parameters behind the simulator
    """
    n_jobs, vcpus = len(scenario.jobs), scenario.machine.vcpus
    speed, used = np.zeros(n_jobs), np.zeros((n_jobs, vcpus))
    job_speeds(
        np.ones(n_jobs, np.uint8),
        np.array([max(job.threads) for job in scenario.jobs]),
        np.full(n_jobs, 2**vcpus - 1),
        np.full(n_jobs, int(Weight.NORMAL)),
        np.full(n_jobs, np.inf),
        np.array([scenario.machine.sibling_of(vcpu) for vcpu in range(vcpus)]),
        np.zeros(vcpus),
        profile.job_array(scenario.job_names),
        profile.host_array(),
        speed,
        used,
        np.zeros(vcpus),
        np.zeros(vcpus),
    )
    return float(speed.sum())


def throughputs(runs: Sequence[Run], alone: float) -> list[float]:
    """
    Each run's best-effort throughput, 1 for what the jobs would have got done alone.

    :param runs: of a scenario whose jobs are endless
    :param alone: what the jobs get done alone [s of work/s], see `speed_alone`
    """
    return [_work_s(run.summary) / (alone * run.summary["makespan_s"]) for run in runs]


def _work_s(summary: dict[str, Any]) -> float:
    return float(sum(job.get("work_s", 0.0) for job in summary["jobs"].values()))
