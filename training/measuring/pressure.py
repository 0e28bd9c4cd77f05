"""What runs beside memcached or a job to disturb it."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.load.generator import CONNECTIONS
from env.allocation import Weight
from env.scenario import Job
from training.analysis.findings import ALONE

STRESS = ("stress-ng", "--quiet", "--timeout", "0")
SOURCES: dict[str, tuple[str, ...]] = {
    "cpu": (*STRESS, "--cpu", "{threads}", "--cpu-method", "int64"),
    "l1d": (*STRESS, "--l1cache", "{threads}"),
    "l1i": (*STRESS, "--icache", "{threads}"),
    "l2": (*STRESS, "--cache", "{threads}", "--cache-level", "2", "--cache-no-affinity"),
    "llc": (*STRESS, "--cache", "{threads}", "--cache-level", "3", "--cache-no-affinity"),
    "membw": (*STRESS, "--memrate", "{threads}", "--memrate-bytes", "256M"),
}
"""Pressure on one resource by endless workers, one for each vCPU pressed on."""

ON_SAME_CORE = ("cpu", "l1d", "l1i", "l2")
"""Core, L1 and L2 are a core's own; on the rest a worker presses from elsewhere, free of charge."""


BACKGROUND, EQUAL = "background", "equal"
Row = dict[str, object]


@dataclass(frozen=True)
class Arrangement:
    """
    Memcached with some threads on some vCPUs, with or without something beside it.

    :param threads: memcached's worker threads
    :param cores: its vCPUs
    :param beside: a pressure source, or `none`
    :param weight: of what is beside: `background`, `equal`, or empty
    :param connections: of the load
    """

    threads: int
    cores: tuple[int, ...]
    beside: str = ALONE
    weight: str = ""
    connections: int = CONNECTIONS

    @property
    def columns(self) -> Row:
        """The columns that tell the arrangement's rows from others."""
        return {
            "threads": self.threads,
            "cores": len(self.cores),
            "beside": f"{self.beside} ({self.weight})" if self.weight else self.beside,
            "connections": self.connections,
        }

    @property
    def name(self) -> str:
        """Name of the arrangement's rounds."""
        beside = "alone" if self.beside == ALONE else f"beside {self.columns['beside']}"
        usual = self.connections == CONNECTIONS
        over = "" if usual else f", {self.connections} connections"
        return f"memcached T{self.threads}C{len(self.cores)} {beside}{over}"


@dataclass(frozen=True)
class Beside:
    """
    What runs next to memcached or to a job.

    :param name: what the tables call it
    :param job: how it is started
    :param threads: its thread count
    :param cores: its vCPUs
    :param weight: its weight
    """

    name: str
    job: Job
    threads: int
    cores: tuple[int, ...]
    weight: Weight


def pressure(source: str, cores: tuple[int, ...], weight: Weight) -> Beside:
    """
    A pressure source on some vCPUs; see `SOURCES`.

    :param source: one of `SOURCES`
    :param cores: the vCPUs to press on
    :param weight: weight of the source
    """
    workers = len(cores)
    job = Job(name=source, command=SOURCES[source], threads=(workers,), memory_mib=1024)
    return Beside(source, job, workers, cores, weight)
