"""What runs beside memcached or a job to disturb it."""

from __future__ import annotations

from dataclasses import dataclass

from env.allocation import Weight
from env.scenario import Job

STRESS = ("stress-ng", "--quiet", "--timeout", "0")
SOURCES: dict[str, tuple[str, ...]] = {
    "cpu": (*STRESS, "--cpu", "1", "--cpu-method", "int64"),
    "l1d": (*STRESS, "--l1cache", "1"),
    "l1i": (*STRESS, "--icache", "1"),
    "l2": (*STRESS, "--cache", "1", "--cache-level", "2", "--cache-no-affinity"),
    "llc": (*STRESS, "--cache", "1", "--cache-level", "3", "--cache-no-affinity"),
    "membw": (*STRESS, "--memrate", "1", "--memrate-bytes", "256M"),
}
"""Pressure on one resource by one endless worker."""

ON_SAME_CORE = ("cpu", "l1d", "l1i", "l2")
"""Core, L1 and L2 are a core's own; on the rest a worker presses from elsewhere, free of charge."""


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
    job = Job(name=source, command=SOURCES[source], threads=(1,), memory_mib=1024)
    return Beside(source, job, 1, cores, weight)
