"""
A scenario: the machine, the service with its SLO, the batch jobs, the load, the control loop.

Scenarios are YAML files, validated on reading. Shipped ones are found by name
(`load_scenario("cca-2025")`), others by path.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from env.errors import InputError, validation_message
from env.family.drawing import FAMILY_FILE, draw, is_drawn
from env.inputs.yaml_files import read_yaml

SCENARIO_FOLDER = Path(__file__).parent / "scenarios"
PROFILE_FOLDER = Path(__file__).parent / "simulator" / "profiles"
THREADS_TOKEN = "{threads}"

CLUSTER_SCENARIOS = ("cca-part3",)
"""The shipped scenarios of several machines, which `env.cluster` reads."""

MAX_JOBS = 20
"""What is open to all jobs fits one 64-bit word (`env.action.open_edits`)."""

MAX_VCPUS = 62
"""Sets of vCPUs are bit masks, and `1 << vcpus` must fit a signed word of 64 bits."""

MOST_MEMBERS = 16
"""So many memcacheds are one service at most."""

MOST_VCPUS = 16
"""So many has a machine of the scenario family at most."""

FAMILY_ROOM = (MAX_JOBS, MOST_VCPUS)
"""Room for the jobs and the vCPUs of every scenario of the family."""

_Read = tuple[dict[str, dict[str, float]], str, dict[str, float]]
"""Of a profile: the jobs' traits, its hash, and the values of its other sections."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Machine(_Part):
    """
    The virtual machine.

    :param vcpus: number of vCPUs
    :param smt_siblings: pairs of vCPUs that share a physical core
    :param memory_mib: memory for all jobs [MiB]
    """

    vcpus: Annotated[int, Field(ge=2, le=MAX_VCPUS)]
    smt_siblings: tuple[tuple[int, int], ...] = ()
    memory_mib: PositiveInt

    @model_validator(mode="after")
    def _siblings_exist(self) -> "Machine":
        seen: set[int] = set()
        for pair in self.smt_siblings:
            for vcpu in pair:
                if not 0 <= vcpu < self.vcpus:
                    raise ValueError(
                        f"smt_siblings: vCPU {vcpu} does not exist; "
                        f"allowed are 0 to {self.vcpus - 1}"
                    )
                if vcpu in seen:
                    raise ValueError(f"smt_siblings: vCPU {vcpu} may have one sibling only")
                seen.add(vcpu)
        return self

    def sibling_of(self, vcpu: int) -> int:
        """
        The vCPU on the same physical core, or -1.

        :param vcpu: its number
        """
        for first, second in self.smt_siblings:
            if vcpu in (first, second):
                return second if vcpu == first else first
        return -1

    @property
    def physical_cores(self) -> tuple[tuple[int, ...], ...]:
        """The vCPUs of each physical core."""
        cores = {tuple(sorted(pair)) for pair in self.smt_siblings}
        paired = {vcpu for pair in cores for vcpu in pair}
        return tuple(sorted(cores | {(v,) for v in range(self.vcpus) if v not in paired}))


class Service(_Part):
    """
    The latency-critical service: one memcached, or a group of them that hold the keys together.

    :param threads: worker threads; in a group each member has one and the proxy the others
    :param slo_us: limit of the 95th percentile of latency [µs]
    :param core_choices: vCPU sets that a policy may give it, the smallest first; the largest is its
        refuge
    :param overflow_cores: a larger set still, for a machine on which the refuge breaks the SLO; no
        published rule knows of it
    :param members: how many memcacheds hold the keys
    :param replicas: how many of them hold each key
    :param proxy: what clients ask in front of the members; None where they ask the members
    """

    name: Literal["memcached"] = "memcached"
    threads: PositiveInt
    slo_us: PositiveFloat
    core_choices: tuple[tuple[int, ...], ...] = Field(min_length=1)
    overflow_cores: tuple[int, ...] = ()
    members: Annotated[int, Field(ge=1, le=MOST_MEMBERS)] = 1
    replicas: PositiveInt = 1
    proxy: Literal["memcached", "nutcracker"] | None = None

    @property
    def processes(self) -> int:
        """How many processes serve: the members, and the proxy where there is one."""
        return self.members + (self.proxy is not None)

    @property
    def told_apart(self) -> int:
        """How many members there are to tell apart: none where one memcached is all of it."""
        return self.members if self.processes > 1 else 0

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """Every vCPU set that the service may get, the smallest first."""
        overflow = (self.overflow_cores,) if self.overflow_cores else ()
        return (*self.core_choices, *overflow)

    @property
    def candidates(self) -> tuple[tuple[int, ...], ...]:
        """
        Sets of which one becomes the refuge when a machine is measured.

        They are the usual ones, and overflow that memcached has a thread a vCPU for.
        """
        return tuple(s for s in self.sets if s in self.core_choices or len(s) <= self.threads)

    @model_validator(mode="after")
    def _choices_grow(self) -> "Service":
        for smaller, larger in zip(self.core_choices, self.core_choices[1:], strict=False):
            if not set(smaller) < set(larger):
                raise ValueError("core_choices: each set must contain the one before it")
        if not self.core_choices[0]:
            raise ValueError("core_choices: memcached needs at least one vCPU")
        return self

    @model_validator(mode="after")
    def _group_can_be(self) -> "Service":
        if self.replicas > self.members:
            raise ValueError(f"replicas: {self.replicas} of {self.members} members; 1 to all")
        if self.replicas > 1 and self.proxy is None:
            raise ValueError("replicas: without a proxy nobody keeps them; allowed is 1")
        if self.proxy == "nutcracker" and self.replicas > 1:
            raise ValueError(f"replicas: {self.replicas}; nutcracker keeps one of each key")
        if self.threads < self.processes > 1:
            raise ValueError(f"threads: {self.threads} in {self.processes} processes; each has one")
        if self.proxy == "nutcracker" and self.threads > self.processes:
            raise ValueError(f"threads: {self.threads}; nutcracker and each member have one")
        return self


class Job(_Part):
    """
    A batch job.

    :param image: the container's image
    :param command: arguments, in which the literal token `{threads}` stands for the thread count
    :param threads: allowed thread counts, in rising order; one is chosen at launch
    :param memory_mib: the container's memory limit [MiB]
    :param endless: the job never ends by itself; what counts is how much it gets done
    :param arrival_s: when it arrives, from the start of the load [s]; nobody sees it before
    """

    name: Name
    image: str = ""
    command: tuple[str, ...] = Field(min_length=1)
    threads: tuple[PositiveInt, ...] = Field(min_length=1)
    memory_mib: PositiveInt
    endless: bool = False
    arrival_s: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _threads_grow(self) -> "Job":
        if list(self.threads) != sorted(set(self.threads)):
            raise ValueError("threads: list each allowed count once, in rising order")
        return self

    def launch_command(self, threads: int) -> tuple[str, ...]:
        """
        The arguments to run with.

        :param threads: thread count, one of `threads`
        :raises InputError: if the job does not allow that count
        """
        if threads not in self.threads:
            allowed = ", ".join(map(str, self.threads))
            raise InputError(f"job {self.name}: {threads} threads; allowed are {allowed}")
        return tuple(part.replace(THREADS_TOKEN, str(threads)) for part in self.command)


class Load(_Part):
    """
    mcperf's dynamic load: a new level every interval.

    :param qps_min: lowest level [requests/s]
    :param qps_max: highest level [requests/s]
    :param interval_s: length of an interval [s]
    :param duration_s: length of the whole load [s]
    :param targets: the levels in place of drawn ones [requests/s], repeated from the first one
    :param target_intervals: number of intervals that each of `targets` lasts
    """

    qps_min: PositiveInt
    qps_max: Annotated[int, Field(gt=0, lt=2**31 - 2)]  # mcperf draws 31-bit numbers
    interval_s: Annotated[float, Field(ge=0.01, le=1e6)]
    duration_s: Annotated[float, Field(ge=0.01, le=1e6)]
    targets: tuple[PositiveInt, ...] = ()
    target_intervals: PositiveInt = 1

    @model_validator(mode="after")
    def _range(self) -> "Load":
        for qps in self.targets:
            if not self.qps_min <= qps <= self.qps_max:
                raise ValueError(f"targets: {qps} is not from {self.qps_min} to {self.qps_max}")
        if self.qps_min > self.qps_max:
            raise ValueError(f"qps_min {self.qps_min} is above qps_max {self.qps_max}")
        if self.interval_s > self.duration_s:
            raise ValueError(
                f"interval_s {self.interval_s} is longer than duration_s {self.duration_s}"
            )
        return self


class Control(_Part):
    """
    The control loop.

    A policy that sleeps until something happens is woken at the first poll after a job has ended
    or the load has moved, or when the SLO guard has changed its level.

    :param period_s: seconds from one poll of the sensors to the next
    :param hold_s: seconds after its last decision by which the policy is woken in any case
    :param wake_qps: smallest move of the load that wakes the policy [requests/s]
    """

    period_s: Annotated[float, Field(ge=0.001, le=60.0)]
    hold_s: Annotated[float, Field(ge=0.001, le=3600.0)]
    wake_qps: PositiveFloat

    @model_validator(mode="after")
    def _hold(self) -> "Control":
        if self.hold_s < self.period_s:
            raise ValueError(f"hold_s {self.hold_s} is shorter than period_s {self.period_s}")
        return self


class Regulation(_Part):
    """
    The bounds the regulator keeps any policy to.

    :param share_service_cores: whether background-weight jobs may run on memcached's vCPUs; where
        they may and it holds every vCPU, jobs of any weight run at that one
    :param service_dwell_s: memcached keeps vCPUs at least this long after it was given them [s]
    :param pause_dwell_s: a job is not paused again before this time has passed [s]
    :param move_dwell_s: a job's vCPUs do not change again before this time has passed [s], unless
        memcached takes them
    """

    share_service_cores: bool = True
    service_dwell_s: PositiveFloat = 1.0
    pause_dwell_s: PositiveFloat = 30.0
    move_dwell_s: PositiveFloat = 1.0


class Delays(_Part):
    """
    Actuation and sensing delays that replace the profile's measured ones; None keeps those.

    :param api_latency_median_s: median time of a call to Docker [s]
    :param api_latency_p90_s: its 90th percentile [s]
    :param api_latency_p99_s: its 99th percentile [s]
    :param fast_latency_s: time until a written cpuset or weight acts [s]
    :param container_start_s: time that a container takes to start [s]
    :param sensor_noise: relative standard deviation of a reading
    :param docker_moves: a job's vCPUs, weight and quota change by calls to Docker, one after
        another, as in the published controllers, in place of being written directly
    :param starts_ahead: containers are made ahead and wait for their jobs' starts; the published
        controllers made each one when its start was decided
    """

    api_latency_median_s: PositiveFloat | None = None
    api_latency_p90_s: PositiveFloat | None = None
    api_latency_p99_s: PositiveFloat | None = None
    fast_latency_s: PositiveFloat | None = None
    container_start_s: PositiveFloat | None = None
    sensor_noise: PositiveFloat | None = None
    docker_moves: bool = False
    starts_ahead: bool = True


class Scenario(_Part):
    """
    Everything that defines one colocation problem.

    :param name: what tables call it
    :param description: one or two sentences for the reader
    :param profile: a shipped profile's name, or a YAML file, relative to the scenario's own
    :param machine: the virtual machine
    :param service: memcached and its SLO
    :param jobs: the batch jobs; none where a queue brings them
    :param load: what memcached serves
    :param control: the control loop's times
    :param regulation: what the regulator keeps any policy to
    :param delays: delays in place of the profile's
    """

    name: Name
    description: str
    profile: str
    machine: Machine
    service: Service
    jobs: tuple[Job, ...] = Field(max_length=MAX_JOBS)
    load: Load
    control: Control
    regulation: Regulation = Regulation()
    delays: Delays = Delays()

    @model_validator(mode="after")
    def _fits_together(self) -> "Scenario":
        names = [job.name for job in self.jobs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"jobs: {name} is listed twice")
        for choice in self.service.sets:
            field = "overflow_cores" if choice == self.service.overflow_cores else "core_choices"
            for vcpu in choice:
                if not 0 <= vcpu < self.machine.vcpus:
                    raise ValueError(
                        f"service.{field}: vCPU {vcpu} does not exist; "
                        f"allowed are 0 to {self.machine.vcpus - 1}"
                    )
        overflow = set(self.service.overflow_cores)
        if overflow and not set(self.service.core_choices[-1]) < overflow:
            raise ValueError(
                "service.overflow_cores: must contain the largest of core_choices, and more"
            )
        for job in self.jobs:
            if job.arrival_s >= self.load.duration_s:
                raise ValueError(
                    f"jobs.{job.name}.arrival_s: {job.arrival_s:g} is not before the load's end, "
                    f"{self.load.duration_s:g}"
                )
            if job.memory_mib > self.machine.memory_mib:
                raise ValueError(
                    f"jobs.{job.name}.memory_mib: {job.memory_mib} exceeds the machine's "
                    f"{self.machine.memory_mib}"
                )
        profile_work_s(self.profile)
        return self

    @property
    def job_names(self) -> tuple[str, ...]:
        """The jobs in the order every array uses."""
        return tuple(job.name for job in self.jobs)

    @property
    def endless(self) -> bool:
        """Whether some job never ends, so that a run ends with the load."""
        return any(job.endless for job in self.jobs)

    @property
    def has_arrivals(self) -> bool:
        """Whether some job arrives during the episode, so that job completion times count."""
        return any(job.arrival_s > 0.0 for job in self.jobs)

    def with_jobs(self, jobs: Iterable[Job]) -> "Scenario":
        """
        A copy with other jobs, of which the profile may know nothing.

        :param jobs: validated ones, with names of their own
        """
        return self.model_copy(update={"jobs": tuple(jobs)})

    def with_changes(self, **parts: dict[str, Any]) -> "Scenario":
        """
        A validated copy with some fields replaced.

        :param parts: for each part the fields to replace, e.g. `load={"interval_s": 5.0}`
        :raises InputError: if the result is not a valid scenario
        """
        content = self.model_dump()
        for part, fields in parts.items():
            content[part] = {**content[part], **fields}
        return _validated(self.name, content)


def scenario_names() -> list[str]:
    """The shipped scenarios of one machine."""
    names = {path.stem for path in SCENARIO_FOLDER.glob("*.yaml") if path != FAMILY_FILE}
    return sorted(names - set(CLUSTER_SCENARIOS))


def profile_names() -> list[str]:
    """The shipped profiles of fitted parameters."""
    return sorted(path.stem for path in PROFILE_FOLDER.glob("*.yaml"))


def profile_work_s(profile: str) -> dict[str, float]:
    """
    The jobs a profile has parameters for, and the seconds each takes alone on one vCPU.

    :param profile: a shipped profile's name, or a YAML file
    :raises ValueError: if there is no such profile
    """
    return {name: traits["work_s"] for name, traits in profile_traits(profile).items()}


def profile_traits(profile: str) -> dict[str, dict[str, float]]:
    """
    What a profile says of each job, by the names of `env.physics.parameters.JOB_FIELDS`.

    :param profile: a shipped or drawn profile's name, or a YAML file
    :raises ValueError: if there is no such profile
    """
    return _read_profile(profile)[0]


def profile_machine(profile: str) -> dict[str, float]:
    """
    What a profile says of memcached, of the host and of what requests cost, by the fields' names.

    :param profile: a shipped or drawn profile's name, or a YAML file
    :raises ValueError: if there is no such profile
    """
    return _read_profile(profile)[2]


def profile_hash(profile: str) -> str:
    """
    The hash a profile carries; empty if it carries none.

    :param profile: a shipped profile's name, or a YAML file
    :raises ValueError: if there is no such profile
    """
    return _read_profile(profile)[1]


def _read_profile(profile: str) -> _Read:
    """What the live side needs of a profile, without the compiler that the physics needs."""
    if is_drawn(profile):
        return _read(draw(profile).profile)
    try:
        path = profile_path(profile)
        return _profile_in(path, path.stat().st_mtime_ns)
    except InputError as error:
        raise ValueError(f"profile: {error}") from error
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"profile: {path}: cannot be read as a profile") from error


def profile_path(profile: str) -> Path:
    """
    The file of a profile.

    :param profile: a shipped profile's name, or a YAML file
    :raises InputError: naming the shipped ones, if none has that name
    """
    if is_profile_file(profile):
        return Path(profile)
    known = profile_names()
    if profile not in known:
        raise InputError(
            f"unknown profile {profile!r}; known profiles: {', '.join(known)} "
            "(or the path of a .yaml file)"
        )
    return PROFILE_FOLDER / f"{profile}.yaml"


def is_profile_file(profile: str) -> bool:
    """
    Whether a profile is named by a file, not by a shipped profile's name.

    :param profile: what the scenario says
    """
    return Path(profile).suffix in (".yaml", ".yml")


@functools.cache
def _profile_in(path: Path, changed_ns: int) -> _Read:
    return _read(read_yaml(path, "a profile"))


def _read(content: dict[str, Any]) -> _Read:
    jobs = {name: _values(job) for name, job in content["jobs"].items()}
    sections = (content["service"], content["host"], content.get("costs", {}))
    machine = {name: value for section in sections for name, value in _values(section).items()}
    return jobs, str(content.get("hash", "")), machine


def _values(section: dict[str, Any]) -> dict[str, float]:
    return {name: float(parameter["value"]) for name, parameter in section.items()}


def load_scenario(
    name_or_path: str | Path, jobless: bool = False, unmeasured: bool = False
) -> Scenario:
    """
    Read and validate a scenario.

    :param name_or_path: a shipped or drawn scenario's name, or a YAML file
    :param jobless: whether it may have no jobs, because a queue brings them
    :param unmeasured: whether it may have jobs that its profile does not know, because they are
        about to be measured
    :raises InputError: one line that names the file, the field and what is allowed
    """
    if is_drawn(str(name_or_path)):
        return _validated(name_or_path, draw(str(name_or_path)).scenario)
    path = Path(name_or_path)
    if str(name_or_path) in scenario_names():
        path = SCENARIO_FOLDER / f"{name_or_path}.yaml"
    known = ", ".join(scenario_names())
    content = read_yaml(path, "a scenario", f"give a YAML file or one of: {known}")
    if isinstance(content, dict) and is_profile_file(str(content.get("profile", ""))):
        content["profile"] = str((path.parent / content["profile"]).resolve())
    scenario = _validated(path, content)
    if not (scenario.jobs or jobless):
        raise InputError(f"{path}: jobs: must have at least 1 entries")
    fitted = profile_work_s(scenario.profile)
    strangers = [name for name in scenario.job_names if name not in fitted]
    if strangers and not unmeasured:
        raise InputError(
            f"{path}: jobs: unknown job {', '.join(strangers)}; profile {scenario.profile} knows "
            f"{', '.join(fitted)}; python -m training.characterise --scenario {path} --out DIR "
            "measures it, then use DIR/scenario.yaml"
        )
    return scenario


def _validated(origin: Path | str, content: object) -> Scenario:
    try:
        return Scenario.model_validate(content)
    except ValidationError as error:
        raise InputError(validation_message(origin, error, _allowed_fields(error))) from error


def _allowed_fields(error: ValidationError) -> str:
    """The fields of the part in which the first fault lies."""
    parts: dict[str, type[BaseModel]] = {
        "machine": Machine,
        "service": Service,
        "jobs": Job,
        "load": Load,
        "control": Control,
        "regulation": Regulation,
        "delays": Delays,
    }
    faults = error.errors()
    unknown = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    location = unknown["loc"]
    part = parts.get(str(location[0]), Scenario) if len(location) > 1 else Scenario
    return f"; allowed are {', '.join(part.model_fields)}"
