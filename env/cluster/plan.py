"""
A plan: on which node, which vCPUs and with how many threads each job runs, and after which others.

Plans are YAML files, checked against their scenario on reading. A job starts as soon as those that
it waits for have ended; who waits for nobody starts at once. The order of the list is that in which
jobs that may start at the same time do.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from env.cluster.cluster_scenario import ClusterPart, ClusterScenario
from env.errors import InputError, os_reason, validation_message
from env.inputs.yaml_files import read_yaml
from env.scenario import SCENARIO_FOLDER, Name

PLAN_FOLDER = SCENARIO_FOLDER / "plans"

Vcpus = Annotated[tuple[Annotated[int, Field(ge=0, le=61)], ...], Field(min_length=1)]


class ServicePlace(ClusterPart):
    """
    Where memcached runs.

    :param node: its node
    :param vcpus: its vCPUs
    :param threads: its worker threads
    """

    node: str
    vcpus: Vcpus
    threads: PositiveInt


class JobPlace(ClusterPart):
    """
    Where and when a job runs.

    :param name: the job
    :param node: its node
    :param vcpus: its vCPUs
    :param threads: its threads
    :param after: the jobs that must have ended before it starts
    """

    name: Name
    node: str
    vcpus: Vcpus
    threads: PositiveInt
    after: tuple[str, ...] = ()


class Reported(ClusterPart):
    """
    What was measured of a published plan.

    :param makespan_s: from the first job's start to the last one's end, a mean of runs [s]
    :param violation_ratio: share of the intervals over the SLO
    :param job_s: each job's run time, if that was published [s]
    :param source: where that was published
    """

    makespan_s: PositiveFloat
    violation_ratio: NonNegativeFloat
    job_s: dict[str, PositiveFloat] = Field(default_factory=dict)
    source: str


class ClusterPlan(ClusterPart):
    """
    A placement of everything.

    :param name: what tables call it
    :param description: where it is from, and what of it is assumed
    :param scenario: the name of the cluster scenario it is for
    :param service: memcached's place
    :param jobs: the jobs' places
    :param reported: what was measured of it, if anything
    """

    name: Name
    description: str = ""
    scenario: str
    service: ServicePlace
    jobs: Annotated[tuple[JobPlace, ...], Field(min_length=1)]
    reported: Reported | None = None

    def job(self, name: str) -> JobPlace:
        """
        A job's place.

        :param name: the job
        """
        return next(place for place in self.jobs if place.name == name)

    def on(self, node: str) -> tuple[JobPlace, ...]:
        """
        The jobs of one node.

        :param node: its name
        """
        return tuple(place for place in self.jobs if place.node == node)


def plan_names() -> list[str]:
    """The shipped plans: those that were published."""
    return sorted(path.stem for path in PLAN_FOLDER.glob("*.yaml"))


def load_plan(name_or_path: str | Path, cluster: ClusterScenario | None = None) -> ClusterPlan:
    """
    Read a plan, and check that it fits its cluster.

    :param name_or_path: a shipped plan's name, or a YAML file
    :param cluster: the scenario that it must be for, if the caller has read it
    :raises InputError: one line that names the file, the field and what is allowed
    """
    path = Path(name_or_path)
    if str(name_or_path) in plan_names():
        path = PLAN_FOLDER / f"{name_or_path}.yaml"
    known = ", ".join(plan_names())
    content = read_yaml(path, "a plan", f"give a YAML file or one of: {known}")
    try:
        plan = ClusterPlan.model_validate(content)
    except ValidationError as error:
        allowed = f"; allowed are {', '.join(ClusterPlan.model_fields)}"
        raise InputError(validation_message(path, error, allowed)) from error
    if cluster is not None:
        check_plan(plan, cluster, path)
    return plan


def save_plan(plan: ClusterPlan, path: Path) -> None:
    """
    Write a plan that `load_plan` reads.

    :param plan: what to write
    :param path: the file
    :raises InputError: if it cannot be written
    """
    content = plan.model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({os_reason(error)})") from error


def check_plan(plan: ClusterPlan, cluster: ClusterScenario, where: Path | str = "plan") -> None:
    """
    Make sure that a plan fits its cluster.

    :param plan: the plan
    :param cluster: its scenario
    :param where: what messages call it
    :raises InputError: one line that names what does not fit, and what is allowed
    """

    def refuse(what: str) -> InputError:
        return InputError(f"{where}: {what}")

    if plan.scenario != cluster.name:
        raise refuse(f"scenario: is {plan.scenario!r}, not {cluster.name!r}")
    known = cluster.job_names
    listed = [place.name for place in plan.jobs]
    for name in listed:
        if name not in known:
            raise refuse(f"jobs: unknown job {name}; the scenario has {', '.join(known)}")
        if listed.count(name) > 1:
            raise refuse(f"jobs: {name} is listed twice")
    missing = [name for name in known if name not in listed]
    if missing:
        raise refuse(f"jobs: {', '.join(missing)} missing")
    _check_place(plan.service, "service", cluster, refuse)
    if cluster.service.node and plan.service.node != cluster.service.node:
        raise refuse(f"service.node: is {plan.service.node}; must be {cluster.service.node}")
    for place in plan.jobs:
        field = f"jobs.{place.name}"
        _check_place(place, field, cluster, refuse)
        allowed = cluster.job(place.name).threads
        if place.threads not in allowed:
            raise refuse(
                f"{field}.threads: {place.threads}; allowed are {', '.join(map(str, allowed))}"
            )
        shared = set(place.vcpus) & set(plan.service.vcpus)
        if place.node == plan.service.node and shared:
            raise refuse(
                f"{field}.vcpus: {', '.join(map(str, sorted(shared)))} of {place.node} "
                "is memcached's"
            )
        unknown = [name for name in place.after if name not in listed]
        if unknown:
            raise refuse(f"{field}.after: unknown job {unknown[0]}")
    before = predecessors(plan.jobs)
    for name in listed:
        if name in before[name]:
            raise refuse(f"jobs.{name}.after: it would wait for itself")
    for node in cluster.node_names:
        room = cluster.type_of(node).machine.memory_mib
        if plan.service.node == node:
            room -= cluster.service.memory_mib
        needed = most_memory(plan.on(node), before, cluster)
        if needed > room:
            raise refuse(f"{node}: jobs that may run at once need {needed} MiB; it has {room}")


def _check_place(
    place: ServicePlace | JobPlace,
    field: str,
    cluster: ClusterScenario,
    refuse: Callable[[str], InputError],
) -> None:
    if place.node not in cluster.node_names:
        raise refuse(
            f"{field}.node: unknown node {place.node!r}; "
            f"the scenario has {', '.join(cluster.node_names)}"
        )
    n_vcpus = cluster.type_of(place.node).machine.vcpus
    for vcpu in place.vcpus:
        if vcpu >= n_vcpus:
            raise refuse(
                f"{field}.vcpus: {place.node} has no vCPU {vcpu}; allowed are 0 to {n_vcpus - 1}"
            )
    if len(set(place.vcpus)) < len(place.vcpus):
        raise refuse(f"{field}.vcpus: lists one twice")


def predecessors(jobs: Iterable[JobPlace]) -> dict[str, set[str]]:
    """
    All the jobs that each one waits for, directly or not; itself too, where it goes in a circle.

    :param jobs: the jobs' places
    """
    direct = {place.name: place.after for place in jobs}
    before: dict[str, set[str]] = {}
    for name in direct:
        waiting, seen = list(direct[name]), set[str]()
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += direct.get(one, ())
        before[name] = seen
    return before


def most_memory(
    jobs: tuple[JobPlace, ...], before: dict[str, set[str]], cluster: ClusterScenario
) -> int:
    """
    The most memory that jobs of one node may need at once: those none of which waits for another.

    :param jobs: the jobs of the node
    :param before: see `predecessors`
    :param cluster: says what each needs [MiB]
    :return: the sum over the costliest such group [MiB]
    """

    def most(candidates: tuple[str, ...]) -> int:
        if not candidates:
            return 0
        first, *rest = candidates
        beside = tuple(
            other for other in rest if other not in before[first] and first not in before[other]
        )
        return max(cluster.job(first).memory_mib + most(beside), most(tuple(rest)))

    return most(tuple(place.name for place in jobs))
