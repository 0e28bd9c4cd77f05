"""
A cluster scenario: types of nodes, one service with its SLO and load, and jobs to place.

Each node is a machine of its own (`env.scenario.Machine`), as fast as its type. How fast that is,
is a factor on the profile's VM with an uncertainty, for memcached and for jobs.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

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
from env.inputs.yaml_files import read_yaml
from env.scenario import (
    CLUSTER_SCENARIOS,
    MAX_JOBS,
    SCENARIO_FOLDER,
    Job,
    Load,
    Machine,
    Name,
    is_profile_file,
    profile_work_s,
)

LabelKey = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
                                r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]  # fmt: skip


class ClusterPart(BaseModel):
    """What a cluster's files are made of: known fields only, and none changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Speed(ClusterPart):
    """
    A factor on the profile's VM.

    :param value: 1 is as fast as the profile's
    :param spread: standard deviation of ln(value): how unsure it is
    :param source: what it follows from
    """

    value: PositiveFloat
    spread: Annotated[float, Field(ge=0.0, le=1.0)]
    source: Annotated[str, Field(min_length=1)]


class NodeType(ClusterPart):
    """
    Nodes that are alike.

    :param name: the value that the scenario's label has on the node
    :param description: the machine type it stands for
    :param count: how many there are; where several, each has a value of its own, see `nodes`
    :param machine: its vCPUs; memory is what the service and all jobs may have together [MiB]
    :param job_speed: of batch jobs
    :param service_speed: of memcached: what one vCPU serves
    """

    name: Name
    description: str = ""
    count: Annotated[int, Field(ge=1, le=100)] = 1
    machine: Machine
    job_speed: Speed
    service_speed: Speed

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their labels' values, which plans call them by: the type's name, or NAME.0, NAME.1."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}.{number}" for number in range(self.count))


class ClusterService(ClusterPart):
    """
    The latency-critical service.

    :param threads: memcached's worker threads, as many vCPUs as it gets where the planner decides
    :param slo_us: limit of the 95th percentile of latency [µs]
    :param memory_mib: what it needs [MiB]
    :param node: the node that it must be on; anywhere if none is named
    :param load: what it serves; steady where `qps_min` is `qps_max`
    """

    threads: PositiveInt
    slo_us: PositiveFloat
    memory_mib: PositiveInt
    node: str = ""
    load: Load


class ClusterScenario(ClusterPart):
    """
    Everything that defines one placement problem.

    :param name: what tables call it
    :param description: one or two sentences for the reader
    :param profile: a shipped profile's name, or a YAML file, relative to the scenario's own
    :param label: the label of a node that says its type
    :param pod_start_s: from the creation of a job to its container's start [s]
    :param service: memcached, its SLO and its load
    :param nodes: the types of nodes
    :param jobs: the batch jobs
    """

    name: Name
    description: str
    profile: str
    label: LabelKey
    pod_start_s: NonNegativeFloat
    service: ClusterService
    nodes: Annotated[tuple[NodeType, ...], Field(min_length=1)]
    jobs: Annotated[tuple[Job, ...], Field(min_length=1, max_length=MAX_JOBS)]

    @model_validator(mode="after")
    def _fits_together(self) -> "ClusterScenario":
        _each_once("jobs", (job.name for job in self.jobs))
        _each_once("nodes", self.node_names)
        if self.service.node and self.service.node not in self.node_names:
            raise ValueError(
                f"service.node: no node {self.service.node!r}; known: {', '.join(self.node_names)}"
            )
        largest = max(kind.machine.memory_mib for kind in self.nodes)
        fitted = profile_work_s(self.profile)
        for job in self.jobs:
            if job.name not in fitted:
                raise ValueError(
                    f"jobs: unknown job {job.name}; profile {self.profile} knows "
                    f"{', '.join(fitted)}"
                )
            if job.memory_mib > largest:
                raise ValueError(
                    f"jobs.{job.name}.memory_mib: {job.memory_mib} exceeds every node's memory, "
                    f"{largest} at most"
                )
            if job.endless or job.arrival_s > 0.0:
                raise ValueError(f"jobs.{job.name}: a job to place is there at the start, and ends")
        return self

    @property
    def node_names(self) -> tuple[str, ...]:
        """All nodes, in the order of their types."""
        return tuple(node for kind in self.nodes for node in kind.nodes)

    @property
    def job_names(self) -> tuple[str, ...]:
        """The jobs in the order every array uses."""
        return tuple(job.name for job in self.jobs)

    def type_of(self, node: str) -> NodeType:
        """
        The type of a node.

        :param node: one of `node_names`
        """
        return next(kind for kind in self.nodes if node in kind.nodes)

    def job(self, name: str) -> Job:
        """
        A job by its name.

        :param name: one of `job_names`
        """
        return next(job for job in self.jobs if job.name == name)


def load_cluster(name_or_path: str | Path) -> ClusterScenario:
    """
    Read and validate a cluster scenario.

    :param name_or_path: a shipped one's name, or a YAML file
    :raises InputError: one line that names the file, the field and what is allowed
    """
    path = Path(name_or_path)
    if str(name_or_path) in CLUSTER_SCENARIOS:
        path = SCENARIO_FOLDER / f"{name_or_path}.yaml"
    known = ", ".join(CLUSTER_SCENARIOS)
    content = read_yaml(path, "a cluster scenario", f"give a YAML file or one of: {known}")
    if isinstance(content, dict) and is_profile_file(str(content.get("profile", ""))):
        content["profile"] = str((path.parent / content["profile"]).resolve())
    try:
        return ClusterScenario.model_validate(content)
    except ValidationError as error:
        allowed = f"; allowed are {', '.join(ClusterScenario.model_fields)}"
        raise InputError(validation_message(path, error, allowed)) from error


def _each_once(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what}: {name} is listed twice")
        seen.add(name)
