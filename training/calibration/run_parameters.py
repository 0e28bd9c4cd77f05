"""Parameters that each run is replayed with: a profile's or refitted ones, on its own VM."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.stats import norm, qmc

from env.errors import InputError
from env.physics.jobs import PRESSURE
from env.physics.parameters import HOST_FIELDS
from env.physics.service import CPU_LIMIT, IDLE_US, VM_SPEED
from env.simulator.profile import Profile, Scatter
from training.calibration.fit_jobs import fit_jobs, read_scaling
from training.calibration.intervals import cut_intervals, read_intervals
from training.calibration.job_states import build_states, fitted_occupancy
from training.calibration.logs.course import JOBS, LOAD_LAG_S
from training.calibration.logs.tables import Remark
from training.calibration.logs.traces import RunTrace
from training.calibration.priors import IDLE_SD
from training.calibration.replay import FloatArray, Physics, replay
from training.calibration.scans import read_scans
from training.calibration.scores import intervals_of, scatter_around
from training.calibration.service_problem import Problem, fit_vm, params_of

# A VM shows its speed and idle latency in its first runs.
FIRST_RUNS = 3

KNOWN_SD = (0.06, 0.1)
"""Of ln(speed) and ln(idle latency) of a VM, where other runs of its day have shown them."""

LAG_SD_S = 0.25
"""Of the moment at which a run's load moves: where p95 say it to 0.1 s, runs of a day differ so."""

DRAWS = norm.ppf(qmc.Sobol(3, seed=1).random_base2(3))
"""Of a VM's speed and idle latency and of the load's lag, in standard deviations: float64[8, 3]."""


def profile_physics(profile: Profile) -> Physics:
    """
    A profile's parameters, on a VM of average speed.

    :param profile: the profile
    """
    return Physics(
        profile.job_array(JOBS),
        profile.host_array(),
        profile.service_array(),
        profile.cost_array(),
    )


def left_out_physics(data: Path, profile: Profile, runs: Sequence[RunTrace], group: str) -> Physics:
    """
    Parameters refitted without one group, as the group's runs may not be known.

    :param data: folder of measured tables
    :param profile: gives what the fits take as known
    :param runs: the runs of all groups
    :param group: the group to leave out
    :raises InputError: the folder lacks the tables that a fit needs, or has no other group
    """
    others = [run for run in runs if run.group != group]
    if not others:
        raise InputError(f"--cross-validate: {group} is the only group")
    full = profile_physics(profile)
    remarks: list[Remark] = []
    scaling = read_scaling(data, profile.years, remarks)
    pressure = {job: float(full.jobs[k, PRESSURE]) for k, job in enumerate(JOBS)}
    year = profile.years[0]
    scans = read_scans(data, year, remarks)
    intervals = read_intervals(data, year, remarks, pressure)
    problem = Problem(scans, intervals, {group: 0.0})
    names = sorted({*scans.groups(), *intervals.groups} - {group})
    service = params_of(problem.solve_all(names))
    service[CPU_LIMIT] = full.service[CPU_LIMIT]
    fit = fit_jobs(build_states(others, fitted_occupancy(service)), scaling)
    host = full.host.copy()
    for field, value in fit.host.items():
        host[HOST_FIELDS.index(field)] = value
    return replace(full, jobs=fit.params, host=host, service=service)


class KnownVms:
    """
    Speed and idle-latency factor of each run's VM, from the VM's other runs.

    Runs of one group and day share a VM. A run whose VM has no other run, or whose own moves are
    not logged, gets factors of 1, the middle of the fitted distribution.

    :param runs: all runs
    :param slo_us: the latency objective of their year [us]
    :param speed_sd: standard deviation of ln(speed) from VM to VM
    """

    def __init__(self, runs: Sequence[RunTrace], slo_us: float, speed_sd: float) -> None:
        self._slo_us = slo_us
        self._speed_sd = speed_sd
        self._by_vm: dict[tuple[str, str], list[RunTrace]] = {}
        for run in runs:
            if run.moves_logged:
                self._by_vm.setdefault((run.group, run.day), []).append(run)

    def on_vm(self, physics: Physics, run: RunTrace) -> Physics:
        """
        Parameters on the VM of one run.

        :param physics: parameters on a VM of average speed
        :param run: the run
        """
        speed, idle = self.factors(run, physics)
        service = physics.service.copy()
        service[VM_SPEED], service[IDLE_US] = speed, service[IDLE_US] * idle
        return replace(physics, service=service)

    def drawn_p95(self, physics: Physics, run: RunTrace) -> FloatArray:
        """
        What p95 a run may have had, as its VM and its load's lag are known so well only.

        :param physics: parameters on a VM of average speed
        :param run: the run
        :return: float64[len(DRAWS), n_intervals], of open replays [us]
        """
        own = self.on_vm(physics, run)
        speed_sd, idle_sd = KNOWN_SD if self._others(run) else (self._speed_sd, IDLE_SD)
        drawn = []
        for speed, idle, lag in DRAWS:
            service = own.service.copy()
            service[VM_SPEED] *= np.exp(speed * speed_sd)
            service[IDLE_US] *= np.exp(idle * idle_sd)
            lag_s = LOAD_LAG_S + lag * LAG_SD_S
            drawn.append(replay(run, replace(own, service=service), False, lag_s).p95_us)
        return np.array(drawn)

    def _others(self, run: RunTrace) -> list[RunTrace]:
        """The first other runs of a run's VM; none where the run's own moves are not logged."""
        if not run.moves_logged:
            return []
        own = self._by_vm[run.group, run.day]
        return [other for other in own if other is not run][:FIRST_RUNS]

    def factors(self, run: RunTrace, physics: Physics) -> tuple[float, float]:
        """
        Speed and idle factor of one run's VM.

        :param run: the run
        :param physics: parameters on a VM of average speed
        """
        others = self._others(run)
        if not others:
            return 1.0, 1.0
        pressure = {job: float(physics.jobs[k, PRESSURE]) for k, job in enumerate(JOBS)}
        intervals = cut_intervals(others, ["vm"] * len(others), self._slo_us, pressure)
        if not len(intervals.qps):
            return 1.0, 1.0
        return fit_vm(None, intervals, physics.service, self._speed_sd)


def scatter_of(
    runs: Sequence[RunTrace], physics: Physics, vms: KnownVms, slo_us: float
) -> Scatter | None:
    """
    How measured p95 of runs scatter around simulated ones.

    :param runs: runs; those whose memcached moves are not logged are left out
    :param physics: parameters on a VM of average speed
    :param vms: what is known of the runs' VMs
    :param slo_us: the latency objective of their year [us]
    """
    compared = []
    for run in runs:
        if run.moves_logged:
            opened = replay(run, vms.on_vm(physics, run), closed=False)
            compared.append(intervals_of(run, opened, vms.drawn_p95(physics, run)))
    return scatter_around(compared, slo_us)
