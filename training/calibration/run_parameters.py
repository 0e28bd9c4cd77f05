"""
Parameters that each run is replayed with: a profile's or refitted ones, on its own VM.

What a VM is like its other runs say, those of the same group and day. A VM has its traits, and so
has every run on it around them; both are held by priors (`training.calibration.priors`). What the
runs cannot tell stays as the prior has it, and as unsure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import norm, qmc

from env.errors import InputError
from env.physics.parameters import HOST_FIELDS, LAUNCH_OVERHEAD_S, PRESSURE, WORK_S
from env.physics.service import CPU_LIMIT, SERVICE_FIELDS
from env.simulator.profile import Profile, Scatter
from training.calibration.fit_jobs import fit_jobs, read_scaling
from training.calibration.intervals import cut_intervals, read_intervals
from training.calibration.job_states import build_states, fitted_occupancy
from training.calibration.logs.course import JOBS, LOAD_LAG_S
from training.calibration.logs.tables import Remark
from training.calibration.logs.traces import RunTrace
from training.calibration.priors import (
    INTERVAL_SD,
    JOB_TRAIT_SD,
    RUN_SD,
    SERVICE_PRIORS,
    TYPE_GAP,
    VM_SD,
    VM_TRAITS,
)
from training.calibration.replay import FloatArray, Physics, replay
from training.calibration.scans import read_scans
from training.calibration.scores import intervals_of, scatter_around
from training.calibration.service_prediction import predict_intervals
from training.calibration.service_problem import Problem, params_of, soft_l1

LAG_SD_S = 0.25
"""Of the moment at which a run's load moves: where p95 say it to 0.1 s, runs of a day differ so."""

_FIELDS = [SERVICE_FIELDS.index(name) for name in VM_TRAITS]
_LARGEST = np.array([SERVICE_PRIORS[n].high if n in SERVICE_PRIORS else np.inf for n in VM_TRAITS])
_BETWEEN_VMS = np.diag([trait.vm_sd**2 for trait in VM_TRAITS.values()])
_BETWEEN_RUNS = np.diag([trait.run_sd**2 for trait in VM_TRAITS.values()])
_NO_TRAITS = np.zeros(len(VM_TRAITS))

DRAWS = norm.ppf(qmc.Sobol(len(VM_TRAITS) + 1, seed=1).random_base2(4))
"""Of a run's traits and of its load's lag, in standard deviations: float64[16, traits + 1]."""


@dataclass(frozen=True)
class Fit:
    """
    What is known before a run's VM is.

    :param physics: parameters on a VM of average speed
    :param vm_types: ln(speed) of the kinds of VM that were scanned
    :param speed_sd: standard deviation of ln(speed) over VMs of any kind
    """

    physics: Physics
    vm_types: tuple[float, ...]
    speed_sd: float


class Traits(NamedTuple):
    """
    Logarithms of the factors of `VM_TRAITS`, as far as they are known.

    :param mean: float64[traits]
    :param covariance: float64[traits, traits]
    """

    mean: FloatArray
    covariance: FloatArray


class _Evidence(NamedTuple):
    """
    What a run says of its VM's traits z, as a likelihood of exp(pull z - z information z / 2).

    :param cost: how badly the run fits, however its traits are chosen
    :param information: float64[traits, traits]
    :param pull: float64[traits]
    """

    cost: float
    information: FloatArray
    pull: FloatArray


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


def profile_fit(profile: Profile) -> Fit:
    """
    What a profile knows.

    :param profile: the profile
    """
    # Scanned VMs are named by a letter or a word, those of runs by their day.
    scanned = [vm.speed for name, vm in profile.vms.items() if not name[-1].isdigit()]
    return Fit(profile_physics(profile), vm_types(np.log(scanned)), profile.vm_speed.spread)


def vm_types(log_speed: FloatArray) -> tuple[float, ...]:
    """
    The kinds of VM, as a machine type may run on several models of CPU: the middles of clusters.

    :param log_speed: float64[n], ln(speed) of the scanned VMs
    :return: ln(speed) of each kind; an average VM where none was scanned
    """
    ordered = np.sort(log_speed)
    kinds = np.split(ordered, np.flatnonzero(np.diff(ordered) > TYPE_GAP) + 1)
    return tuple(float(kind.mean()) for kind in kinds if len(kind)) or (0.0,)


def left_out_fit(data: Path, profile: Profile, runs: Sequence[RunTrace], group: str) -> Fit:
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
    x = problem.solve_all(names)
    service = params_of(x)
    service[CPU_LIMIT] = full.service[CPU_LIMIT]
    fit = fit_jobs(build_states(others, fitted_occupancy(service)), scaling)
    known = zip(HOST_FIELDS, full.host, strict=True)
    host = np.array([fit.host.get(field, value) for field, value in known])
    seen = np.array([name != group for name in scans.groups()])
    return Fit(
        replace(full, jobs=fit.params, host=host, service=service),
        vm_types(x[problem.parts.scan_speed][seen]),
        profile.vm_speed.spread,
    )


class KnownVms:
    """
    What each run's VM is like, from its other runs.

    Runs of one group and day share a VM. A run whose VM has no other run is played on an average
    VM; memcached also where the run's own moves are not logged.

    :param runs: all runs
    :param slo_us: the latency objective of their year [us]
    :param fit: what is known before the VMs are
    """

    def __init__(self, runs: Sequence[RunTrace], slo_us: float, fit: Fit) -> None:
        self._slo_us = slo_us
        self._fit = fit
        self._pressure = {job: float(fit.physics.jobs[k, PRESSURE]) for k, job in enumerate(JOBS)}
        self._by_vm: dict[tuple[str, str], list[RunTrace]] = {}
        for run in runs:
            self._by_vm.setdefault((run.group, run.day), []).append(run)
        self._evidence: dict[str, list[_Evidence]] = {}
        self._paces: dict[str, Mapping[str, float]] = {}

    def on_vm(self, run: RunTrace) -> Physics:
        """
        Parameters on the VM of one run.

        :param run: the run
        """
        own = self._fit.physics
        jobs = own.jobs.copy()
        jobs[:, [WORK_S, LAUNCH_OVERHEAD_S]] *= self._job_seconds(run)[:, None]
        return replace(own, jobs=jobs, service=_with(own.service, self.traits(run).mean))

    def drawn_p95(self, run: RunTrace) -> FloatArray:
        """
        What p95 a run may have had, as its VM and its load's lag are known so well only.

        :param run: the run
        :return: float64[len(DRAWS), n_intervals], of open replays [us]
        """
        own = self.on_vm(run)
        known = self.traits(run)
        scale = np.linalg.cholesky(known.covariance)
        drawn = []
        for *factors, lag in DRAWS:
            service = _with(self._fit.physics.service, known.mean + scale @ factors)
            lag_s = LOAD_LAG_S + lag * LAG_SD_S
            drawn.append(replay(run, replace(own, service=service), False, lag_s).p95_us)
        return np.array(drawn)

    def traits(self, run: RunTrace) -> Traits:
        """
        What memcached is like in a run, by the other runs of its VM.

        :param run: the run
        """
        others = self._others(run) if run.moves_logged else []
        return self._traits([other for other in others if other.moves_logged])

    def _others(self, run: RunTrace) -> list[RunTrace]:
        """The other runs of a run's VM."""
        return [other for other in self._by_vm[run.group, run.day] if other is not run]

    def _traits(self, seen: Sequence[RunTrace]) -> Traits:
        """What memcached is like in a new run on a VM of which these runs were seen."""
        told = [self._says(run) for run in seen]
        if not told:
            covariance = _BETWEEN_VMS + _BETWEEN_RUNS
            covariance[0, 0] = self._fit.speed_sd**2
            return Traits(_NO_TRAITS, covariance)
        # The VM is of the kind that fits all of its runs together best.
        kind = int(np.argmin([sum(one.cost for one in kinds) for kinds in zip(*told, strict=True)]))
        prior = np.linalg.inv(_BETWEEN_VMS)
        information = prior + sum(of_run[kind].information for of_run in told)
        pull = prior @ self._middle(kind) + sum(of_run[kind].pull for of_run in told)
        covariance = np.linalg.inv(information)
        return Traits(covariance @ pull, (covariance + covariance.T) / 2.0 + _BETWEEN_RUNS)

    def _middle(self, kind: int) -> FloatArray:
        """Traits of the middle VM of a kind."""
        middle = _NO_TRAITS.copy()
        middle[0] = self._fit.vm_types[kind]
        return middle

    def _says(self, run: RunTrace) -> list[_Evidence]:
        """What a run says of its VM, for each kind of VM that it may be."""
        if run.run not in self._evidence:
            self._evidence[run.run] = [
                self._says_if(run, self._middle(kind)) for kind in range(len(self._fit.vm_types))
            ]
        return self._evidence[run.run]

    def _says_if(self, run: RunTrace, middle: FloatArray) -> _Evidence:
        """The same if its VM is of one kind, from the run's own best traits and the curvature."""
        intervals = cut_intervals([run], ["vm"], self._slo_us, self._pressure)
        between = _BETWEEN_VMS + _BETWEEN_RUNS
        sd = np.sqrt(np.diag(between))

        def residuals(traits: FloatArray) -> FloatArray:
            service = _with(self._fit.physics.service, traits)
            p95 = predict_intervals(intervals, service, np.exp(traits[:1]), np.ones(1))
            error = np.log(p95 / intervals.p95_us) / INTERVAL_SD
            return np.concatenate([(traits - middle) / sd, soft_l1(error)])

        found = least_squares(residuals, middle, diff_step=1e-3, xtol=1e-3, ftol=1e-4)
        slope = found.jac[len(middle) :]
        information = slope.T @ slope
        prior = np.linalg.inv(between)
        pull = (information + prior) @ found.x - prior @ middle
        # What the run has of its own, apart from its VM, is integrated out.
        shared = np.linalg.inv(np.eye(len(middle)) + information @ _BETWEEN_RUNS)
        return _Evidence(float(found.cost), shared @ information, shared @ pull)

    def _job_seconds(self, run: RunTrace) -> FloatArray:
        """
        How many times as long each job takes on a run's VM: float64[len(JOBS)].

        The posterior mean of a VM's factor for all jobs times that of its factor for each job.
        """
        seen = [self._pace(other) for other in self._others(run)]
        log_ratio = [np.array([pace[job] for pace in seen if job in pace]) for job in JOBS]
        count = np.array([len(own) for own in log_ratio])
        mean = np.array([own.mean() if len(own) else 0.0 for own in log_ratio])
        variance = JOB_TRAIT_SD**2 + RUN_SD**2 / np.maximum(count, 1)
        weight = (count > 0) / variance
        common = float(weight @ mean) / (VM_SD**-2 + float(weight.sum()))
        return np.exp(common + weight * (mean - common) * JOB_TRAIT_SD**2)

    def _pace(self, run: RunTrace) -> Mapping[str, float]:
        """By job, ln of the seconds that a run took over those that it takes on an average VM."""
        if run.run not in self._paces:
            memcached = self._traits([run] if run.moves_logged else [])
            service = _with(self._fit.physics.service, memcached.mean)
            run_s = replay(run, replace(self._fit.physics, service=service), closed=False).run_s
            self._paces[run.run] = {
                job.name: float(np.log(job.run_s / seconds))
                for job, seconds in zip(run.jobs, run_s, strict=True)
            }
        return self._paces[run.run]


def _with(service: FloatArray, traits: FloatArray) -> FloatArray:
    """Memcached's parameters on a VM of some traits."""
    own = service.copy()
    own[_FIELDS] = np.minimum(own[_FIELDS] * np.exp(traits), _LARGEST)
    return own


def scatter_of(runs: Sequence[RunTrace], vms: KnownVms, slo_us: float) -> Scatter | None:
    """
    How measured p95 of runs scatter around simulated ones.

    :param runs: runs; those whose memcached moves are not logged are left out
    :param vms: what is known of the runs' VMs
    :param slo_us: the latency objective of their year [us]
    """
    compared = []
    for run in runs:
        if run.moves_logged:
            opened = replay(run, vms.on_vm(run), closed=False)
            compared.append(intervals_of(run, opened, vms.drawn_p95(run)))
    return scatter_around(compared, slo_us)
