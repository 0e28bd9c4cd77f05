"""
Fit a profile to measured runs: the parameters of one kind of VM, each with its spread.

    python -m training.calibrate --data DIR --profile cca-2025 --out FILE

Three steps: the jobs' memory pressure (with memcached's capacity straight from its scans), then
memcached with that pressure, then the jobs with memcached's fitted capacity. What is left out,
and why, is printed and stored in the profile. Nothing depends on time or chance but the bootstrap,
whose seed is fixed: the same tables give the same file, bit for bit, on processors of one kind;
another kind adds up in another order. A fit that does not converge, or ends on a bound, says so
and writes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from threadpoolctl import threadpool_limits

from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_writable
from env.physics.parameters import HOST_FIELDS, PRESSURE, REQUIRED_JOB_FIELDS
from env.physics.service import SERVICE_FIELDS
from env.simulator.profile import Parameter, Profile, save_profile
from training.calibration.fit_jobs import (
    JobFit,
    Scaling,
    duration_errors,
    fit_jobs,
    job_spreads,
    read_scaling,
)
from training.calibration.fit_service import fit_service
from training.calibration.job_states import Occupancy, build_states, fitted_occupancy
from training.calibration.logs.course import (
    BATCH_SIBLINGS,
    DEFAULT_SLO_US,
    JOBS,
    SERVERS,
    SLO_US,
    VCPUS,
)
from training.calibration.logs.run_logs import count_by_group, read_runs
from training.calibration.logs.tables import Remark, summarise
from training.calibration.logs.traces import RunTrace
from training.calibration.run_parameters import KnownVms, profile_fit, scatter_of
from training.calibration.scans import read_points
from training.processes import side_by_side
from training.statistics import significant

FloatArray = npt.NDArray[np.float64]

JOB_UNITS = dict(zip(REQUIRED_JOB_FIELDS, ("s", "1", "vCPU", "1", "1", "1/vCPU", "s"), strict=True))
JOB_SOURCES = {
    "work_s": "job_scaling, events",
    "serial_fraction": "job_scaling, events",
    "cores_per_thread": "job_scaling (user over real time of one thread)",
    "smt": "events, job_scaling (4 against 8 threads)",
    "sensitivity": "events; wide prior",
    "pressure": "events; wide prior, canneal = 1 by definition",
    "launch_overhead_s": "events; prior: container wall time minus the job's own clock",
}

# What no table here identifies: control paths of public logs and of a 2-core VM, and assumptions.
_SEEN = "prior: not measured on these VMs; seen on"
HOST_KNOWN: dict[str, tuple[float, float, str, str]] = {
    "load_lag_low_s": (0.4, 0.1, "s", "intervals against cpu: the load moves 0.4-0.7 s late"),
    "load_lag_high_s": (0.7, 0.1, "s", "intervals against cpu: the load moves 0.4-0.7 s late"),
    "api_latency_median_s": (0.036, 0.3, "s", "public logs: docker update, pause, unpause"),
    "api_latency_p90_s": (0.118, 0.3, "s", "public logs: docker update, pause, unpause"),
    "api_latency_p99_s": (1.1, 0.4, "s", "public logs, right after container starts"),
    "fast_latency_s": (0.001, 0.7, "s", "2-core VM: cgroup files 0.01-0.1 ms, taskset 1 ms"),
    "container_start_s": (0.27, 0.1, "s", "2-core VM: 0.22-0.31 s"),
    "migration_cost_s": (0.02, 1.0, "s", "assumption: caches refill once; not visible in the logs"),
    "resume_cost_s": (0.05, 1.0, "s", "assumption: caches refill once; not visible in the logs"),
    "sensor_noise": (0.03, 0.5, "1", "2-core VM: thread CPU clocks over 1 s"),
    "stalls_per_s": (0.03, 1.0, "1/s", f"{_SEEN} a 16-vCPU VM, one or two polls of 25 ms at times"),
    "stall_s": (0.04, 0.5, "s", f"{_SEEN} a 16-vCPU VM, one or two polls of 25 ms"),
    "steals_per_s": (0.05, 1.0, "1/s", f"{_SEEN} a 2-vCPU VM, 0.05 to 0.1 ticks of 10 ms a second"),
    "steal_s": (0.005, 0.7, "s", f"{_SEEN} a 2-vCPU VM, whose clock of 10 ms tells no more"),
    "gate_latency_s": (0.001, 0.7, "s", "prior: a byte through a pipe to a process that waits"),
}


@dataclass(frozen=True)
class Edition:
    """What belongs to a profile's name."""

    year: int
    description: str

    @property
    def server(self) -> str:
        """Machine type."""
        return SERVERS[self.year]


EDITIONS = {
    "cca-2025": Edition(2025, "4 vCPUs of Intel n2, memcached with 2 threads"),
    "cca-2024": Edition(2024, "4 vCPUs of AMD n2d, memcached with 2 threads"),
}


@dataclass(frozen=True)
class JobData:
    """What the jobs are fitted to."""

    runs: tuple[RunTrace, ...]
    scaling: Scaling
    remarks: tuple[Remark, ...]


def read_job_data(data: Path, edition: Edition, note: Callable[[str], None]) -> JobData:
    """
    Read and check the runs and scaling tables of one edition.

    :param data: folder of measured tables
    :param edition: the edition whose runs are read
    :param note: is told what was left out
    :raises InputError: a table is missing, empty or of no use
    """
    tables = read_runs(data, JOBS, years=(edition.year,), server=edition.server)
    remarks = list(tables.remarks)
    scaling = read_scaling(data, (edition.year,), remarks)
    for line in summarise(remarks, rows=True):
        note(line)
    if not tables.runs:
        raise InputError(f"{data}: no usable runs of {edition.year} on {edition.server}")
    return JobData(tables.runs, scaling, tuple(remarks))


def scanned_occupancy(data: Path, year: int) -> Occupancy:
    """
    How busy memcached's vCPUs are before anything is fitted.

    In proportion to the largest throughput on 1 and 2 vCPUs in the scans (medians).

    :param data: folder of measured tables
    :param year: the year whose scans are read
    :raises InputError: there are no such scans
    """
    table = read_points(data, year, [])
    table = table[table["threads"] == 2]
    best = table.groupby(["cores", "repo", "path", "rep"])["achieved_qps"].max()
    medians = best.groupby("cores").median()
    if 1 not in medians.index or 2 not in medians.index:
        raise InputError(f"{data}: latency_curves: no scans of {year} with 2 threads")
    capacity = [float(medians.loc[min(width, 2)]) for width in range(1, VCPUS + 1)]
    return lambda qps, width: np.minimum(1.0, qps / capacity[width - 1])


def _left_out_duration_errors(
    runs: Sequence[RunTrace], scaling: Scaling, occupancy: Occupancy, start: JobFit
) -> FloatArray:
    """Relative errors of job durations, each group predicted by a fit to the others."""
    groups = tuple(dict.fromkeys(run.group for run in runs))
    if len(groups) < 2:
        return np.zeros(0)
    own = [build_states([run for run in runs if run.group == one], occupancy) for one in groups]
    others = [build_states([run for run in runs if run.group != one], occupancy) for one in groups]
    fits = side_by_side(partial(fit_jobs, scaling=scaling, start=start), others)
    return np.concatenate(list(map(duration_errors, own, fits)))


def check(fit: JobFit) -> None:
    """
    Refuse a fit that did not converge or that ended on a bound.

    :param fit: the fit to judge
    :raises InputError: the fit cannot be trusted
    """
    if not fit.converged:
        raise InputError("the job fit did not converge: no profile written")
    if fit.at_bound:
        raise InputError(
            f"the job fit ended on the bound of {', '.join(fit.at_bound)}: no profile written"
        )


def calibrate(data: Path, name: str, say: Console | None = None) -> Profile:
    """
    Fit one profile.

    :param data: folder of measured tables
    :param name: profile to fit, one of `EDITIONS`
    :param say: receives lines of progress; silent if not given
    :raises InputError: unusable tables, or a fit that cannot be trusted
    """
    edition = EDITIONS.get(name)
    if edition is None:
        raise InputError(f"unknown profile {name!r}; known profiles: {', '.join(EDITIONS)}")
    console = say or Console(quiet=True)
    begun = time.monotonic()

    def note(text: str) -> None:
        console.print(f"[{time.monotonic() - begun:6.1f} s] {text}", markup=False, highlight=False)

    jobs = read_job_data(data, edition, note)
    groups = count_by_group(jobs.runs)
    note(f"{len(jobs.runs)} runs: " + ", ".join(f"{g} {n}" for g, n in groups.items()))
    first = fit_jobs(build_states(jobs.runs, scanned_occupancy(data, edition.year)), jobs.scaling)
    pressure = {job: float(first.params[k, PRESSURE]) for k, job in enumerate(JOBS)}
    note("memory pressure: " + ", ".join(f"{job} {value:.2f}" for job, value in pressure.items()))

    service = fit_service(data, edition.year, pressure)
    note("memcached fitted")
    values = np.array([service.service[field].value for field in SERVICE_FIELDS])
    occupancy = fitted_occupancy(values)
    states = build_states(jobs.runs, occupancy)
    # From the priors: what memcached's memory traffic costs has two optima that are as good.
    fit = fit_jobs(states, jobs.scaling)
    check(fit)
    note("jobs fitted")
    spreads, host_spreads = job_spreads(states, jobs.scaling, fit)
    left_out = np.abs(_left_out_duration_errors(jobs.runs, jobs.scaling, occupancy, fit))
    note("spreads and left-out errors known")

    for line in summarise((one for one in service.excluded if one not in jobs.remarks), rows=True):
        note(line)
    remarks = dict.fromkeys((*jobs.remarks, *service.excluded))
    in_sample = np.abs(duration_errors(states, fit))
    fit_error = {
        "in-sample job duration, median": float(np.median(in_sample)),
        "in-sample job duration, p90": float(np.quantile(in_sample, 0.9)),
        "left-out job duration, median": float(np.median(left_out)),
        "left-out job duration, p90": float(np.quantile(left_out, 0.9)),
    } | service.fit_error
    for what, error in fit_error.items():
        note(f"{what}: {error:.4g}")
    profile = Profile(
        name=name,
        description=f"{edition.description}; fitted to {len(jobs.runs)} public runs",
        sources=(
            *(f"{group}: {count} runs" for group, count in groups.items()),
            *("latency_curves", "job_scaling", "intervals", "events"),
        ),
        fit_error={what: significant(error) for what, error in fit_error.items()},
        excluded=tuple(summarise(remarks)),
        server=edition.server,
        years=(edition.year,),
        siblings=tuple(int(c) for c in BATCH_SIBLINGS),
        siblings_unknown=True,
        service=service.service,
        jobs=_job_section(fit, spreads),
        host=_host_section(fit, host_spreads),
        vm_speed=service.vm_speed,
        vms=service.vms,
    )
    slo_us = SLO_US.get(edition.year, DEFAULT_SLO_US)
    vms = KnownVms(jobs.runs, slo_us, profile_fit(profile))
    scatter = scatter_of(jobs.runs, vms, slo_us)
    return profile.model_copy(update={"scatter": scatter})


def _job_section(fit: JobFit, spreads: FloatArray) -> dict[str, dict[str, Parameter]]:
    return {
        job: {
            field: Parameter(
                value=significant(float(fit.params[row, column])),
                spread=significant(float(spreads[row, column]), 3),
                unit=JOB_UNITS[field],
                source=JOB_SOURCES[field],
            )
            for column, field in enumerate(REQUIRED_JOB_FIELDS)
        }
        for row, job in enumerate(JOBS)
    }


def _host_section(fit: JobFit, spreads: dict[str, float]) -> dict[str, Parameter]:
    """Fitted and known parameters of the host, in the order of `HOST_FIELDS`."""
    between_vms = float(np.sqrt(np.mean(np.log(list(fit.vm_speed.values())) ** 2)))
    section = {}
    for field in HOST_FIELDS:
        if field == "job_speed":
            # A handful of VMs: no claim that they differ by less than 3 %.
            section[field] = Parameter(
                value=1.0,
                spread=significant(max(between_vms, 0.03), 3),
                unit="1",
                source=f"events: speed factors of {len(fit.vm_speed)} groups",
            )
        elif field in fit.host:
            section[field] = Parameter(
                value=significant(fit.host[field]),
                spread=significant(spreads[field], 3),
                unit="1",
                source="events",
            )
        else:
            value, spread, unit, source = HOST_KNOWN[field]
            section[field] = Parameter(value=value, spread=spread, unit=unit, source=source)
    return section


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.calibrate", description="Fit a profile to measured runs."
    )
    add = line.add_argument
    add("--data", type=Path, required=True, help="folder of measured tables")
    add("--profile", required=True, help=f"one of {', '.join(EDITIONS)}")
    add("--out", type=Path, required=True, help="profile file to write (.yaml)")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Calibrate from the command line.

    :param argv: command line, the process's own if none is given
    """
    given = parser().parse_args(argv)
    console = Console(soft_wrap=True)
    with exit_on_bad_input(), threadpool_limits(1):
        require_writable(given.out)
        profile = calibrate(given.data, given.profile, console)
        try:
            fitted = save_profile(profile, given.out)
        except OSError as error:
            raise InputError(f"{given.out}: cannot be written ({error.strerror})") from error
    console.print(f"wrote {given.out} (hash {fitted.hash[:12]})", markup=False, highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
