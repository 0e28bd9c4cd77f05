"""
Profiles: the fitted parameters of one kind of VM, each with its spread, unit and source.

A profile is a YAML file written by `python -m training.calibrate`. Every parameter is positive;
its `spread` is the standard deviation of ln(value), which is what domain randomisation draws
from. The physics takes profiles as arrays (numba freezes globals), in the order of
`SERVICE_FIELDS`, `JOB_FIELDS` and `HOST_FIELDS`.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from env.errors import InputError, validation_message
from env.family.drawing import draw, is_drawn
from env.inputs.yaml_files import read_yaml
from env.physics.parameters import (
    COST_FIELDS,
    HOST_FIELDS,
    INTERRUPTION,
    JOB_FIELDS,
    NEUTRAL_COSTS,
    OPTIONAL_HOST_FIELDS,
    OPTIONAL_JOB_FIELDS,
    REQUIRED_JOB_FIELDS,
)
from env.physics.service import SERVICE_FIELDS
from env.scenario import profile_path

FloatArray = npt.NDArray[np.float64]

# What a value may be, where that is less than every positive number.
LIMITS = {
    "serial_fraction": (0.0, 1.0),
    "smt": (0.0, 1.0),
    "straggling": (0.0, 1.0),
    "cores_per_thread": (1.0, 4.0),
    "service_exponent": (0.0, 1.0),
    "client_cpu": (0.0, 1.0),
    "client_exponent": (0.0, 1.0),
    "agent_cpu": (0.0, 1.0),
}


class Parameter(BaseModel):
    """One fitted number: its value, how sure it is, and where it comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float = Field(gt=0.0, allow_inf_nan=False)
    spread: float = Field(ge=0.0, le=3.0, allow_inf_nan=False)
    unit: str = "1"
    source: str = Field(min_length=1)


class Vm(BaseModel):
    """
    How one measured VM differed from the profile's, as memcached's latency shows it.

    :param speed: factor on memcached's speed
    :param idle: factor on its latency without load
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    speed: float = Field(gt=0.0, allow_inf_nan=False)
    idle: float = Field(gt=0.0, allow_inf_nan=False)


class Background(BaseModel):
    """
    How background work yielded to memcached where sharing was measured.

    :param mechanism: the file that was written, or what else was done
    :param kernel: release of Linux, whose schedulers differ in what yields
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mechanism: str = Field(min_length=1)
    kernel: str = Field(min_length=1)


class Scatter(BaseModel):
    """
    How ln(measured p95 / simulated p95) is distributed, see `env/simulator/scatter.py`.

    :param mean: below 0 where the simulator's p95 are too high
    :param spread: the distribution's scale where p95 is 0.6 of the SLO
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float = Field(allow_inf_nan=False)
    spread: float = Field(gt=0.0, allow_inf_nan=False)


class Profile(BaseModel):
    """
    Fitted parameters of one kind of VM.

    :param name: what `load_profile` calls it
    :param sources: tables and publications that the numbers come from
    :param fit_error: named errors of the fit; shown beside every simulated figure
    :param excluded: runs and rows left out of the fit, and why
    :param server: machine type of the VM; validation takes the runs made on it
    :param years: editions of the measured runs
    :param siblings: the vCPU that slows batch work on each vCPU, -1 for none (`job_speeds`)
    :param siblings_unknown: the runs fit the scenario's own pairs about as well; drawn physics has
        either
    :param service: memcached, by `SERVICE_FIELDS`
    :param jobs: batch jobs by name, each by `JOB_FIELDS`; `OPTIONAL_JOB_FIELDS` may be left out
    :param host: the VM and its control paths, by `HOST_FIELDS`; `OPTIONAL_HOST_FIELDS` may be
        left out
    :param costs: CPU time of requests, by `COST_FIELDS`; any of them may be left out
    :param vm_speed: how memcached's capacity differs from VM to VM of this type
    :param vms: the VMs of the fit, by group and letter (scans) or day (runs)
    :param background: how background work yielded, if that is known
    :param scatter: how measured p95 scatter around simulated ones, if runs have told
    :param yardstick_us: CPU time of a fixed piece of work while the jobs were measured [µs]
        (`deploy.linux.sensors.Yardstick`), if it was measured
    :param hash: SHA-256 of the content; a file whose hash does not match is refused
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    description: str
    sources: tuple[str, ...]
    fit_error: dict[str, float]
    excluded: tuple[str, ...] = ()
    server: str = ""
    years: tuple[int, ...] = ()
    siblings: tuple[int, ...] = ()
    siblings_unknown: bool = False
    service: dict[str, Parameter]
    jobs: dict[str, dict[str, Parameter]]
    host: dict[str, Parameter]
    costs: dict[str, Parameter] = {}
    vm_speed: Parameter
    vms: dict[str, Vm] = {}
    background: Background | None = None
    scatter: Scatter | None = None
    yardstick_us: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    hash: str = ""

    @model_validator(mode="after")
    def _complete(self) -> "Profile":
        _check_fields("service", self.service, SERVICE_FIELDS)
        for job, fields in self.jobs.items():
            _check_fields(f"jobs.{job}", fields, REQUIRED_JOB_FIELDS, OPTIONAL_JOB_FIELDS)
        required = [name for name in HOST_FIELDS if name not in OPTIONAL_HOST_FIELDS]
        _check_fields("host", self.host, required, OPTIONAL_HOST_FIELDS)
        _check_fields("costs", self.costs, (), COST_FIELDS)
        return self

    @model_validator(mode="after")
    def _siblings_are_pairs(self) -> "Profile":
        count = len(self.siblings)
        for vcpu, sibling in enumerate(self.siblings):
            if sibling == -1:
                continue
            if not 0 <= sibling < count or sibling == vcpu or self.siblings[sibling] != vcpu:
                raise ValueError(
                    f"siblings: vCPU {vcpu} has {sibling}; allowed are -1 for none, or another "
                    f"vCPU, 0 to {count - 1}, that has {vcpu} in turn"
                )
        return self

    @property
    def job_names(self) -> tuple[str, ...]:
        """The jobs this profile knows."""
        return tuple(self.jobs)

    def service_array(self) -> FloatArray:
        """Memcached's parameters in the order of `SERVICE_FIELDS`."""
        return _column(self.service, SERVICE_FIELDS, "value")

    def service_spreads(self) -> FloatArray:
        """Their spreads, in the same order."""
        return _column(self.service, SERVICE_FIELDS, "spread")

    def job_array(self, names: Sequence[str]) -> FloatArray:
        """
        One row of `JOB_FIELDS` per job.

        :param names: jobs in the order wanted
        :raises ValueError: the profile does not know one of them
        """
        return self._job_columns(names, "value")

    def job_spreads(self, names: Sequence[str]) -> FloatArray:
        """
        Their spreads, in the same shape but for the optional ones where no job has them.

        So profiles that lack those draw what they always drew.

        :param names: jobs in the order wanted
        :raises ValueError: the profile does not know one of them
        """
        spreads = self._job_columns(names, "spread")
        return spreads if spreads[:, INTERRUPTION].any() else spreads[:, :INTERRUPTION]

    def host_array(self) -> FloatArray:
        """The host's parameters in the order of `HOST_FIELDS`; 0 for what may be left out."""
        return _column(self.host, HOST_FIELDS, "value")

    def host_spreads(self) -> FloatArray:
        """Their spreads, in the same order."""
        return _column(self.host, HOST_FIELDS, "spread")

    def cost_array(self) -> FloatArray:
        """What requests cost, in the order of `COST_FIELDS`."""
        costs = dict(zip(COST_FIELDS, NEUTRAL_COSTS, strict=True))
        costs |= {name: parameter.value for name, parameter in self.costs.items()}
        return np.array(list(costs.values()), dtype=np.float64)

    def cost_spreads(self) -> FloatArray:
        """
        Their spreads, in the same order up to the last that there is; 0 for what was left out.

        So profiles that lack the last ones draw what they always drew.
        """
        known = {name: parameter.spread for name, parameter in self.costs.items()}
        count = max((COST_FIELDS.index(name) + 1 for name in known), default=0)
        return np.array([known.get(name, 0.0) for name in COST_FIELDS[:count]], dtype=np.float64)

    def on_vm(self, name: str) -> "Profile":
        """
        The profile of one of the VMs it was fitted to.

        :param name: name of the VM, one of `vms`
        :raises ValueError: there is no such VM
        """
        if name not in self.vms:
            raise ValueError(f"profile {self.name}: no VM {name!r}; known: {', '.join(self.vms)}")
        vm = self.vms[name]
        service = _scaled(self.service, "vm_speed", vm.speed)
        return self.model_copy(update={"service": _scaled(service, "idle_us", vm.idle)})

    def at_speed(self, speed: float) -> "Profile":
        """
        The profile of the same VM while its host does all work faster or slower.

        :param speed: relative to when it was measured
        """
        changed = {
            "service": _scaled(self.service, "vm_speed", speed),
            "host": _scaled(self.host, "job_speed", speed),
            "costs": _scaled(self.costs, "agent_cpu", 1.0 / speed),
            "yardstick_us": self.yardstick_us and self.yardstick_us / speed,
        }
        return self.model_copy(update=changed)

    def _job_columns(self, names: Sequence[str], what: str) -> FloatArray:
        for name in names:
            if name not in self.jobs:
                known = ", ".join(self.jobs)
                raise ValueError(f"profile {self.name}: no job {name!r}; known jobs: {known}")
        rows = [_column(self.jobs[name], JOB_FIELDS, what) for name in names]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(JOB_FIELDS))


def load_profile(name_or_path: str | Path) -> Profile:
    """
    Read a profile.

    :param name_or_path: a shipped or drawn profile's name, or the path of a YAML file
    :raises InputError: one line that names the file, the field and what is allowed
    """
    if is_drawn(str(name_or_path)):
        return Profile.model_validate(draw(str(name_or_path)).profile)
    path = profile_path(str(name_or_path))
    content = read_yaml(path, "a profile")
    if not isinstance(content, dict):
        raise InputError(f"{path}: must be a mapping with {', '.join(Profile.model_fields)}")
    try:
        profile = Profile.model_validate(content)
    except ValidationError as error:
        raise InputError(validation_message(path, error)) from error
    if profile.hash and profile.hash != content_hash(profile):
        raise InputError(
            f"{path}: hash: does not match the content; the file was edited after "
            "training.calibrate wrote it (remove the hash line to use it anyway)"
        )
    return profile


def scatter(values: FloatArray, spreads: FloatArray, rng: np.random.Generator) -> None:
    """
    Multiply parameters by log-normal factors, at most two standard deviations off.

    :param values: float64[...], is changed
    :param spreads: float64[...] of the same shape, standard deviations of ln(value)
    :param rng: source of what is random
    """
    values *= np.exp(spreads * rng.standard_normal(spreads.shape).clip(-2.0, 2.0))


def save_profile(profile: Profile, path: Path) -> Profile:
    """
    Write a profile with its content hash; the same content gives the same bytes.

    :param profile: the profile; its own hash is ignored
    :param path: the file to write
    :return: the profile as written
    """
    profile = profile.model_copy(update={"hash": content_hash(profile)})
    content = profile.model_dump(mode="json", exclude=_empty(profile))
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    path.write_text(text, encoding="utf-8")
    return profile


def content_hash(profile: Profile) -> str:
    """
    SHA-256 over the canonical JSON of everything but the hash itself.

    :param profile: the profile; its own hash is ignored
    """
    content = profile.model_dump(mode="json", exclude={"hash", *_empty(profile)})
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _empty(profile: Profile) -> set[str]:
    """Sections that came later than the first profiles, whose hashes they must not change."""
    late = ("costs", "background", "scatter", "siblings_unknown", "yardstick_us")
    return {name for name in late if not getattr(profile, name)}


def within_limits(name: str, value: float) -> float:
    """
    The value of a parameter, or the nearest one that it may have.

    :param name: of the parameter
    :param value: in its unit
    """
    low, high = LIMITS.get(name, (0.0, math.inf))
    return min(max(value, low), high)


def _scaled(fields: dict[str, Parameter], name: str, factor: float) -> dict[str, Parameter]:
    """A section in which one parameter, if it has that, is so many times as large."""
    if name not in fields:
        return fields
    value = within_limits(name, fields[name].value * factor)
    return fields | {name: fields[name].model_copy(update={"value": value})}


def _column(fields: Mapping[str, Parameter], order: Sequence[str], what: str) -> FloatArray:
    columns = [getattr(fields[name], what) if name in fields else 0.0 for name in order]
    return np.array(columns, dtype=np.float64)


def _check_fields(
    where: str,
    given: Mapping[str, Parameter],
    wanted: Sequence[str],
    optional: Sequence[str] = (),
) -> None:
    for name in wanted:
        if name not in given:
            raise ValueError(f"{where}.{name}: is missing")
    known = (*wanted, *optional)
    for name, parameter in given.items():
        if name not in known:
            raise ValueError(f"{where}.{name}: unknown field; known: {', '.join(known)}")
        low, high = LIMITS.get(name, (0.0, float("inf")))
        if not low <= parameter.value <= high:
            raise ValueError(
                f"{where}.{name}: value {parameter.value:g} must lie in {low:g} to {high:g}"
            )
