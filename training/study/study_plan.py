"""A plan: experiments on a group of memcacheds, each a grid of points, and how long they take."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from deploy.group.group import GroupSetup
from deploy.load.closed_loop import MOST_CLIENTS
from deploy.load.mix import Mix
from env.errors import InputError, validation_message
from env.inputs.yaml_files import read_yaml
from env.scenario import MOST_MEMBERS

PLANS = Path(__file__).with_name("plans")
FIELDS = (
    *("members", "replicas", "proxy", "proxy_threads", "multi_get"),
    *("writes", "keys", "clients"),
)
"""What points differ by; those of one group first."""

MOST_EXPERIMENTS, MOST_POINTS = 20, 1000
"""Of a study, and of an experiment; the shipped ones have 6 and 48 at most."""

Replicas = Literal["one", "half", "all"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\p{C}]*$")]


@dataclass(frozen=True)
class StudyPoint:
    """
    One thing to measure: a group, and what its clients do.

    :param members: servers
    :param replicas: members that hold a key: `one`, `half` of them (rounded up) or `all`
    :param proxy: `memcached`'s own, `nutcracker`, or `none`: clients ask the only member
    :param proxy_threads: threads of the proxy
    :param multi_get: `sharded`, or sent `whole` to one member
    :param writes: share of SETs
    :param keys: of each GET
    :param clients: who wait for their answers, and do not think
    """

    members: int
    replicas: str
    proxy: str
    proxy_threads: int
    multi_get: str
    writes: float
    keys: int
    clients: int

    @property
    def setup(self) -> GroupSetup:
        """The group."""
        held_by = {"one": 1, "half": (self.members + 1) // 2, "all": self.members}[self.replicas]
        proxy: Literal["memcached", "nutcracker"] = (
            "nutcracker" if self.proxy == "nutcracker" else "memcached"
        )
        whole = self.multi_get == "whole"
        return GroupSetup(self.members, held_by, self.proxy_threads, whole, proxy=proxy)

    @property
    def mix(self) -> Mix:
        """What its clients ask for."""
        return Mix(update=self.writes, multi_get=self.keys)

    @property
    def fields(self) -> dict[str, Any]:
        """Its values by name."""
        return {name: getattr(self, name) for name in FIELDS}


class PlanPart(BaseModel):
    """What plans are made of: known fields only, and none changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Grid(PlanPart):
    """
    Values that are combined each with each; see `StudyPoint`.

    A field that is not named has its first default.
    """

    members: tuple[Annotated[int, Field(ge=1, le=MOST_MEMBERS)], ...] | None = None
    replicas: tuple[Replicas, ...] | None = None
    proxy: tuple[Literal["memcached", "nutcracker", "none"], ...] | None = None
    proxy_threads: tuple[Annotated[int, Field(ge=1, le=64)], ...] | None = None
    multi_get: tuple[Literal["sharded", "whole"], ...] | None = None
    writes: tuple[Share, ...] | None = None
    keys: tuple[Annotated[int, Field(ge=1, le=1000)], ...] | None = None
    clients: tuple[Annotated[int, Field(ge=1, le=MOST_CLIENTS)], ...] | None = None


DEFAULTS: dict[str, tuple[Any, ...]] = {
    "members": (3,),
    "replicas": ("one",),
    "proxy": ("memcached",),
    "proxy_threads": (1,),
    "multi_get": ("sharded",),
    "writes": (0.0,),
    "keys": (1,),
    "clients": (16,),
}


class StudyExperiment(PlanPart):
    """
    One question, and the points that answer it.

    :param name: of its table and picture
    :param title: of its part of the report
    :param shown: what its picture shows: `clients` or another field along the axis, or `factors`:
        the effects of the fields that have two values, a 2^k r design
    :param grid: the points
    :param quick: values that take the place of the grid's with `--quick`
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")]
    title: Text
    shown: Literal["factors", "clients", "members", "writes", "keys"] = "clients"
    grid: Grid
    quick: Grid = Grid()

    def points(self, quick: bool) -> list[StudyPoint]:
        """
        Its points, those of one group side by side.

        :param quick: take the fewer values of `quick`
        :raises ValueError: if they are more than `MOST_POINTS`
        """
        values = []
        for name in FIELDS:
            fewer = getattr(self.quick, name) if quick else None
            values.append(dict.fromkeys(fewer or getattr(self.grid, name) or DEFAULTS[name]))
        if math.prod(map(len, values)) > MOST_POINTS:
            raise ValueError(f"{self.name}: more than {MOST_POINTS} points")
        return [StudyPoint(*one) for one in itertools.product(*values)]

    @model_validator(mode="after")
    def _can_be_measured(self) -> StudyExperiment:
        for quick in (False, True):
            points = self.points(quick)
            for point in points:
                if point.proxy == "none" and point.members > 1:
                    raise ValueError(f"{self.name}: without a proxy there is one member")
                _ = point.setup, point.mix
            if self.shown == "factors":
                counts = [len({getattr(p, f) for p in points}) for f in FIELDS]
                if set(counts) != {1, 2}:
                    raise ValueError(f"{self.name}: factors have two values, other fields one")
        return self


class Effort(PlanPart):
    """
    How long things are measured.

    :param warm_s: cut from the start of each run [s]
    :param length_s: of a run after that [s]
    :param fewest: runs of each point
    :param most: runs of a point that is not known to 5 % yet
    :param limit_s: no runs are added after this time [s]
    """

    warm_s: PositiveFloat
    length_s: PositiveFloat
    fewest: Annotated[int, Field(ge=2)]
    most: PositiveInt
    limit_s: PositiveFloat


class StudyPlan(PlanPart):
    """
    A study.

    :param name: what the report calls it
    :param description: for the reader
    :param full: effort without `--quick`
    :param quick: effort with it
    :param experiments: in the order of the report
    """

    name: Text
    description: Text
    full: Effort
    quick: Effort
    experiments: Annotated[
        tuple[StudyExperiment, ...], Field(min_length=1, max_length=MOST_EXPERIMENTS)
    ]

    @model_validator(mode="after")
    def _each_once(self) -> StudyPlan:
        names = [one.name for one in self.experiments]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"experiments: {name} is there twice")
        return self

    def effort(self, quick: bool) -> Effort:
        """
        How long things are measured.

        :param quick: with `--quick`
        """
        return self.quick if quick else self.full

    def points(self, quick: bool) -> list[StudyPoint]:
        """
        All points, each once, those of one group side by side.

        :param quick: with `--quick`
        """
        found = dict.fromkeys(p for one in self.experiments for p in one.points(quick))
        return sorted(found, key=lambda point: tuple(point.fields.values()))


def load_plan(named: str) -> StudyPlan:
    """
    Read a plan.

    :param named: a shipped plan's name, or a YAML file
    :raises InputError: one line that names the file and what is wrong
    """
    shipped = {path.stem: path for path in PLANS.glob("*.yaml")}
    path = shipped.get(named, Path(named))
    content = read_yaml(path, "a study's plan", f"shipped: {', '.join(sorted(shipped))}")
    try:
        return StudyPlan.model_validate(content)
    except ValidationError as error:
        raise InputError(validation_message(path, error)) from error
