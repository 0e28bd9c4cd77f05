"""Parameters that each run is replayed with: a profile's or refitted ones, on its own VM."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from env.errors import InputError
from env.physics.jobs import PRESSURE
from env.physics.parameters import HOST_FIELDS
from env.physics.service import CPU_LIMIT, IDLE_US, VM_SPEED
from env.simulator.profile import Profile
from training.calibration.fit_jobs import fit_jobs, read_scaling
from training.calibration.intervals import cut_intervals, read_intervals
from training.calibration.job_states import build_states
from training.calibration.logs.course import JOBS
from training.calibration.logs.tables import Remark
from training.calibration.logs.traces import RunTrace
from training.calibration.replay import Physics
from training.calibration.scans import read_scans
from training.calibration.service_problem import Problem, fit_vm, params_of
from training.calibration.year_profile import fitted_occupancy

# A VM shows its speed and idle latency in its first runs.
FIRST_RUNS = 3


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

    def factors(self, run: RunTrace, physics: Physics) -> tuple[float, float]:
        """
        Speed and idle factor of one run's VM.

        :param run: the run
        :param physics: parameters on a VM of average speed
        """
        others = [other for other in self._by_vm.get((run.group, run.day), []) if other is not run]
        if not others or not run.moves_logged:
            return 1.0, 1.0
        pressure = {job: float(physics.jobs[k, PRESSURE]) for k, job in enumerate(JOBS)}
        others = others[:FIRST_RUNS]
        intervals = cut_intervals(others, ["vm"] * len(others), self._slo_us, pressure)
        if not len(intervals.qps):
            return 1.0, 1.0
        return fit_vm(None, intervals, physics.service, self._speed_sd)
