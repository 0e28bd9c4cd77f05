"""
A profile, and a scenario, from what was measured on this machine.

memcached's parameters come from the fit that `training.calibrate` uses, with its priors: sweeps of
memcached alone take the place of the public scans, points beside batch work that of runs. A
parameter that the measurements did not narrow down keeps its prior, and says so. Jobs are
`training.machine.job_traits`', load, SLO and refuge `training.machine.local_load`'s. What is not
measured at all is taken from the scenario's own profile, and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml

from env.errors import InputError
from env.physics.parameters import OPTIONAL_HOST_FIELDS
from env.physics.service import SERVICE_FIELDS
from env.scenario import Scenario, load_scenario
from env.simulator.profile import Parameter, Profile, save_profile
from training.analysis.curves import trusted
from training.analysis.findings import ALONE
from training.analysis.queueing import SATURATED
from training.calibration.intervals import Intervals
from training.calibration.priors import FREE, SERVICE_PRIORS
from training.calibration.scans import Scans
from training.calibration.service_problem import Problem, params_of
from training.calibration.year_profile import HOST_KNOWN
from training.machine.job_traits import HERE, NARROWED, Left, as_prior, job_traits, left_by_load
from training.machine.local_load import local_load
from training.measuring.pressure import BACKGROUND, EQUAL
from training.measuring.samples import LOADED, SERVING
from training.statistics import significant

FloatArray = npt.NDArray[np.float64]

LEAST_LOAD = 1 / 36  # of the largest: the course's 5K of 180K
WAKE = 1 / 12  # the course's 15K of 180K
SAME_MACHINE = 1e-3  # spread of ln(speed) and ln(idle latency) within one machine
CHANGE_SD = 1.0  # of ln(what a change costs work): jobs fill the caches more or less
BELOW = 0.9  # part of one vCPU's capacity up to which the CPU time of requests is fitted
LOOP_VCPUS = 0.02  # what a deployment's loop takes at most, but for its probe (benchmarks.live)
COST_SD = 0.1  # of ln(it): what points of one sweep scatter by
Z_90 = 1.2816  # the 90th percentile of a standard normal
NORMAL_MEDIAN = 0.6745  # the median of its absolute value
DIRECT = {"background_latency": 1.5, "background_capacity": 1.5, "equal_latency": 1.0}
"""
Spreads of ln(value) of what is measured directly, on a machine that the priors' VMs say nothing
about.
"""

STRAGGLING_SD = 1.0
"""Spread of ln(straggling): whether threads wait for the slowest one is a matter of the programs,
so other machines' jobs say little of it. A rehearsal and deployments do (`training.refinement`)."""


def fit_machine(
    scenario: Scenario,
    base: Profile,
    latency: pd.DataFrame,
    jobs: pd.DataFrame,
    actuation: pd.DataFrame,
    machine: str,
) -> Profile:
    """
    Fit a profile to one machine's measurements.

    :param scenario: what they were made for
    :param base: gives what was not measured
    :param latency: see `training.analysis.findings`; with `beside_cores`, what ran beside memcached
        used
    :param jobs: see `training.analysis.findings`
    :param actuation: see `training.measuring.actuation`
    :param machine: what to call it
    :raises InputError: if there is not enough to fit to
    """
    points = trusted(latency, ["threads", "cores", "beside", "target_qps"]).dropna(
        subset=["p95_us"]
    )
    service, error = _service(scenario, points)
    capacity_qps = service["core_capacity_qps"].value
    left = left_by_load(jobs, capacity_qps)
    costs = _costs(points, capacity_qps, left)
    powers = {field: parameter.value for field, parameter in costs.items()}
    company = {SERVING: left.load ** powers.get("service_exponent", 1.0)}
    if "client_cpu" in powers:
        company[LOADED] = powers["client_cpu"] * left.load ** powers["client_exponent"]
    return Profile(
        name=scenario.name,
        description=f"measured on {machine}",
        sources=(f"{HERE}: {len(points)} points of load, {len(jobs)} runs of jobs",),
        fit_error=error,
        siblings=tuple(scenario.machine.sibling_of(c) for c in range(scenario.machine.vcpus)),
        service=service,
        costs=costs,
        jobs={job.name: job_traits(job.name, jobs, base, company) for job in scenario.jobs},
        host=_host(scenario, base, actuation),
        vm_speed=Parameter(value=1.0, spread=0.05, unit="1", source="prior: one machine only"),
    )


def _service(
    scenario: Scenario, points: pd.DataFrame
) -> tuple[dict[str, Parameter], dict[str, float]]:
    alone = points[points["beside"] == ALONE].reset_index(drop=True)
    shared = points[points["beside"].str.endswith((f"({BACKGROUND})", f"({EQUAL})"))]
    shared = shared[shared["beside"].str.startswith("cpu ")].reset_index(drop=True)
    if len(alone) < 6:
        raise InputError(f"{len(alone)} points of memcached alone; a fit takes at least 6")
    scale = _scale(alone)
    problem = Problem(_scans(scenario, alone, scale), _intervals(scenario, shared, scale))
    for name, width in DIRECT.items():
        problem.log_sd[FREE.index(name)] = width
    x = problem.solve(SERVICE_PRIORS["tail_shape"].median)
    spread = problem.spread(x) * _misfit(problem, x)
    params = params_of(x)
    crowded = (alone["shares_client"] > 0).to_numpy()
    full = alone[~crowded & (alone["achieved_qps"] < SATURATED * alone["target_qps"])]
    use = full["cpu_util_pct"] / 100.0 / np.minimum(full["threads"], full["cores"])
    fields: dict[str, Parameter] = {}
    for name in SERVICE_FIELDS:
        value, width, unit, source = float(params[SERVICE_FIELDS.index(name)]), 0.0, "1", ""
        if name == "vm_speed":
            source = "1 by definition"
        elif name == "cpu_limit":
            value = float(np.clip(use.median(), 0.1, 1.0)) if len(use) else 0.8
            width, unit = 0.03, "vCPU"
            source = f"{HERE}, at saturation" if len(use) else "prior: saturation not reached"
        else:
            prior = SERVICE_PRIORS[name]
            value *= scale.of(prior.unit)
            width, unit = float(spread[FREE.index(name)]), prior.unit
            widest = DIRECT.get(name, prior.sd)
            known = name != "tail_shape" and width < NARROWED * widest
            width = width if known else widest
            source = HERE if known else f"prior (public runs' fit of memcached): {prior.source}"
        fields[name] = Parameter(
            value=significant(value), spread=significant(width, 3), unit=unit, source=source
        )
    p95, capacity = problem.scan_prediction(x)
    ratio = p95 / problem.scans.p95_us
    errors = {"in-sample p95 alone, median": np.median(np.abs(ratio - 1.0))}
    served = capacity[problem.scans.saturated] / problem.scans.capacity - 1.0
    if len(served):
        errors["in-sample capacity, worst"] = np.abs(served).max()
    if crowded.any():
        errors["in-sample p95 on vCPUs shared with the load, median"] = np.median(
            np.abs(ratio[crowded] - 1.0)
        )
    for weight in (BACKGROUND, EQUAL):
        rows = shared["beside"].str.endswith(f"({weight})").to_numpy()
        if rows.any():
            ratio = problem.interval_prediction(x) / problem.intervals.p95_us
            errors[f"in-sample p95 beside {weight} weight, median"] = np.median(
                np.abs(ratio[rows] - 1.0)
            )
    return fields, {name: significant(float(value)) for name, value in errors.items()}


@dataclass(frozen=True)
class _Scale:
    """
    This machine in units of the VMs that the priors were made for.

    The priors know the shape of the curves, not a loopback's speed: latency and load are linear in
    the parameters of their units, so loads and latencies are fitted as multiples of the priors'.

    :param load: this machine's loads over those of the priors
    :param latency: the same of latencies
    """

    load: float
    latency: float

    def of(self, unit: str) -> float:
        """What a parameter of a unit is to be multiplied by."""
        units = {"1/s": self.load, "us": self.latency, "requests": self.load * self.latency}
        return units.get(unit, 1.0)


def _misfit(problem: Problem, x: FloatArray) -> float:
    """
    How much wider measurements scatter around the fit than it takes for granted, at least 1.

    A fit's curvature says how sure it is if the scatter is what was assumed; on a machine whose
    speed drifts it is several times that, and spreads grow by as much (Birge, "The calculation of
    errors by the method of least squares", Physical Review 40, 1932). The scatter is taken from the
    median, as a normal one's: the fit forgives outliers, too.
    """
    measured = problem.residuals(x)[: problem.measurements]
    return max(1.0, float(np.median(np.abs(measured))) / NORMAL_MEDIAN)


def _scale(alone: pd.DataFrame) -> _Scale:
    one = alone[alone["cores"] == alone["cores"].min()]
    calm = one[one["target_qps"] <= 0.5 * one["target_qps"].max()]
    return _Scale(
        float(one["achieved_qps"].max()) / SERVICE_PRIORS["core_capacity_qps"].median,
        float(calm["p95_us"].median()) / SERVICE_PRIORS["level_us"].median,
    )


def _scans(scenario: Scenario, alone: pd.DataFrame, scale: _Scale) -> Scans:
    saturated, capacity = [], []
    for _, scan in alone.groupby(["threads", "cores"], sort=True):
        full = scan[scan["achieved_qps"] < SATURATED * scan["target_qps"]]
        if len(full):
            saturated.append(int(full.index[0]))
            capacity.append(float(full["achieved_qps"].median()) / scale.load)
    return Scans(
        vm_names=("here",),
        vm=np.zeros(len(alone), dtype=np.int64),
        threads=alone["threads"].to_numpy(np.int64),
        cores=alone["cores"].to_numpy(np.int64),
        qps=alone["target_qps"].to_numpy(np.float64) / scale.load,
        p95_us=alone["p95_us"].to_numpy(np.float64) / scale.latency,
        speed_sd=SAME_MACHINE,
        saturated=np.array(saturated, dtype=np.int64),
        capacity=np.array(capacity),
        siblings=_siblings(scenario),
        idle_sd=SAME_MACHINE,
        client=_client(alone),
    )


def _intervals(scenario: Scenario, shared: pd.DataFrame, scale: _Scale) -> Intervals:
    """Each point beside batch work as an interval of one state."""
    count = len(shared)
    width = scenario.machine.vcpus
    own = shared["cores"].to_numpy(np.int64)
    busy = np.array(
        [
            [share if c < n else 0.0 for c in range(width)]
            for share, n in zip(
                shared["beside_cores"].to_numpy(np.float64) / np.maximum(own, 1), own, strict=True
            )
        ]
    ).reshape(-1, width)
    background = shared["beside"].str.endswith(f"({BACKGROUND})").to_numpy()[:, None]
    return Intervals(
        vm_names=("here",),
        groups=("here",),
        vm=np.zeros(count, dtype=np.int64),
        run=np.arange(count),
        batch=np.ones(count, dtype=bool),
        qps=shared["target_qps"].to_numpy(np.float64) / scale.load,
        p95_us=shared["p95_us"].to_numpy(np.float64) / scale.latency,
        slo_us=scenario.service.slo_us,
        first=np.arange(count + 1),
        duration_s=np.ones(count),
        mask=(1 << own) - 1,
        threads=shared["threads"].to_numpy(np.int64),
        background=np.where(background, busy, 0.0),
        equal=np.where(background, 0.0, busy),
        pressure=np.zeros(count),
        siblings=_siblings(scenario),
        client=_client(shared),
    )


def _client(points: pd.DataFrame) -> FloatArray:
    """What the load generator took of the vCPU that it shares with memcached, if it does."""
    used = points["client_cores"].clip(0.0, 0.95)
    return np.where(points["shares_client"] > 0, used, 0.0)


def _siblings(scenario: Scenario) -> npt.NDArray[np.int64]:
    """SMT siblings with memcached's vCPUs numbered first, as they were given to it."""
    machine = scenario.machine
    first = list(scenario.service.candidates[-1])
    order = first + [c for c in range(machine.vcpus) if c not in first]
    place = {vcpu: k for k, vcpu in enumerate(order)} | {-1: -1}
    return np.array([place[machine.sibling_of(vcpu)] for vcpu in order], dtype=np.int64)


def _costs(points: pd.DataFrame, capacity_qps: float, left: Left) -> dict[str, Parameter]:
    """
    CPU time of requests by the load, in powers of it: batches grow with the load and cost less.

    The load and its probe cost most alone, above all where there is little of it: they wake an idle
    vCPU thousands of times a second, and what that costs a VM is charged to them. So they count as
    they were measured on a vCPU with a job, if they were, and what they take beside one that never
    rests is what it does not get.

    :param points: of memcached, with what it and the load generator used
    :param capacity_qps: of one vCPU
    :param left: what they leave to jobs
    """
    # At capacity all of it is used, however requests are batched; nothing is served in a window
    # that whoever measured was held up in until it had no length left.
    below = points["achieved_qps"].between(0.0, BELOW * capacity_qps, inclusive="neither")
    told = points[below & (points["client_cores"] > 0) & (points["cpu_util_pct"] > 0)]
    one = told[(told["beside"] == ALONE) & (told["cores"] == 1)]
    if len(one) < 2:
        return {}
    part, used = _logarithms(one, capacity_qps, one["cpu_util_pct"] / 100.0)
    costs = {"service_exponent": _power(float(part @ used / (part @ part)))}
    if (points["shares_client"] > 0).any():  # it runs on one of the scenario's vCPUs
        crowded = told[(told["shares_client"] > 0) & (told["beside"] != ALONE)]
        met = crowded if crowded["target_qps"].nunique() > 1 else one
        exponent, full = np.polyfit(*_logarithms(met, capacity_qps, met["client_cores"]), 1)
        power = _power(float(exponent))
        most = math.exp(full)
        if math.isfinite(left.vcpu):
            most = (1.0 - left.vcpu) / left.load**power.value
        client = Parameter(
            value=significant(min(most, 1.0)), spread=COST_SD, unit="vCPU", source=HERE
        )
        agent = Parameter(
            value=significant(LOOP_VCPUS + float(met["probe_cores"].median())),
            spread=COST_SD,
            unit="vCPU",
            source=f"{HERE}: a probe; the loop: benchmarks.live",
        )
        costs |= {"client_cpu": client, "client_exponent": power, "agent_cpu": agent}
    return costs


def _logarithms(
    points: pd.DataFrame, capacity_qps: float, used: pd.Series
) -> tuple[FloatArray, FloatArray]:
    """Of the load, as a part of what one vCPU serves, and of what it used."""
    part = points["achieved_qps"].to_numpy(np.float64) / capacity_qps
    return np.log(part), np.log(used.to_numpy(np.float64))


def _power(value: float) -> Parameter:
    return Parameter(
        value=significant(min(max(value, 0.05), 1.0)), spread=COST_SD, unit="1", source=HERE
    )


def _host(scenario: Scenario, base: Profile, actuation: pd.DataFrame) -> dict[str, Parameter]:
    """
    The control paths, measured where this machine's runtime is the one that will be used.

    What is not measured is the base's, `straggling` with less trust.
    """
    seen = actuation.set_index(["of", "action"])
    host = {field: as_prior(parameter, base) for field, parameter in base.host.items()}
    straggling = host["straggling"]
    host["straggling"] = straggling.model_copy(
        update={"spread": max(straggling.spread, STRAGGLING_SD)}
    )

    def measured(field: str, value: float, spread: float, what: str) -> None:
        host[field] = Parameter(
            value=significant(max(value, 1e-6)),  # by chance a small cost can be measured as none
            spread=significant(spread, 3),
            unit=HOST_KNOWN[field][2],
            source=f"{HERE}: {what}",
        )

    fast = [("process", "set_cores"), ("service", "pin_service")]
    fast_s = float(seen.loc[fast, "median_s"].max())
    measured("fast_latency_s", fast_s, 0.7, "cpuset file, affinity of all threads")
    noise = float(seen.loc[("service", "sensor_noise"), "median_s"])
    measured("sensor_noise", noise, 0.5, "CPU over a polling window")
    for action, field in (("move", "migration_cost_s"), ("resume", "resume_cost_s")):
        if ("work", action) in seen.index:
            cost_s = float(seen.loc[("work", action), "median_s"])
            measured(field, cost_s, CHANGE_SD, "CPU time of work that fills the caches")
    # Jobs that have images will run in containers.
    runtime = "docker" if any(job.image for job in scenario.jobs) else "process"
    if (runtime, "start") in seen.index:
        start_s = float(seen.loc[(runtime, "start"), "median_s"])
        measured("container_start_s", start_s, 0.3, f"start of a {runtime} job")
        opened = seen.loc[(runtime, "gate")]
        # The scale of a lognormal with this median and 90th percentile.
        scale = math.log(float(opened["p90_s"]) / float(opened["median_s"])) / Z_90
        spread = max(scale, 0.3)
        measured("gate_latency_s", float(opened["median_s"]), spread, f"gate of a {runtime} job")
        calls = seen.loc[[(runtime, "pause"), (runtime, "resume")]]
        for field, column in (
            ("api_latency_median_s", "median_s"),
            ("api_latency_p90_s", "p90_s"),
            ("api_latency_p99_s", "p99_s"),
        ):
            measured(field, float(calls[column].max()), 0.3, f"pause, resume of a {runtime} job")
    return host | _hiccups(host, actuation)


def _hiccups(host: dict[str, Parameter], actuation: pd.DataFrame) -> dict[str, Parameter]:
    """
    How often and for how long this machine hiccups, where that was looked for.

    A rate is half an event more than was seen, over the time (Jeffreys' prior for a Poisson rate);
    lengths are taken to be exponential. Either is as sure as the number seen allows.
    """
    seen = actuation[actuation["of"] == "hiccups"].set_index("action")
    if seen.empty:
        return {}
    found = {
        name: Parameter(value=value, spread=spread, unit=unit, source=source)
        for name, (value, spread, unit, source) in HOST_KNOWN.items()
        if name in OPTIONAL_HOST_FIELDS and name not in host
    }
    for action, rate, length in (
        ("stalls", "stalls_per_s", "stall_s"),
        ("steals", "steals_per_s", "steal_s"),
    ):
        row = seen.loc[action]
        events = float(row["seen"])
        what = f"{HERE}: {events:g} {action} in {row['watched_s']:.0f} s"
        found[rate] = Parameter(
            value=significant((events + 0.5) / float(row["watched_s"])),
            spread=significant(1.0 / math.sqrt(events + 0.5), 3),
            unit="1/s",
            source=what,
        )
        if events:
            found[length] = Parameter(
                value=significant(float(row["mean_s"])),
                spread=significant(1.0 / math.sqrt(events), 3),
                unit="s",
                source=what,
            )
    return found


def write_profile(
    profile: Profile, scenario: Scenario, latency: pd.DataFrame, scans: pd.DataFrame, out: Path
) -> str:
    """
    Write `profile.yaml` and the scenario that goes with it, `scenario.yaml`.

    :param profile: what was fitted
    :param scenario: what it was derived from
    :param latency: see `training.analysis.findings`
    :param scans: see `local_load`
    :param out: folder
    :return: how load, SLO and refuge were chosen
    :raises InputError: if one vCPU has no knee and was not saturated, or a file cannot be written
    """
    suited = local_load(latency, scans, scenario.service)
    content = scenario.model_dump(mode="json", exclude_defaults=True)
    most = round(suited.most_qps, -3)
    content["description"] = f"{scenario.description} Measured: {suited.text}."
    content["profile"] = "profile.yaml"
    content["service"]["slo_us"] = float(round(suited.slo_us))
    usual = [list(cores) for cores in scenario.service.candidates if len(cores) <= suited.refuge]
    largest = list(scenario.service.sets[-1])
    overflow = largest if largest != usual[-1] else []
    content["service"] |= {"core_choices": usual, "overflow_cores": overflow}
    content["load"] |= {"qps_min": max(1, round(LEAST_LOAD * most, -2)), "qps_max": int(most)}
    content["load"]["qps_min"] = int(content["load"]["qps_min"])
    content["control"]["wake_qps"] = float(round(WAKE * most))
    try:
        save_profile(profile, out / "profile.yaml")
        path = out / "scenario.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False, width=100), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    load_scenario(path)
    return suited.text
