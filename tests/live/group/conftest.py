"""Scenarios whose service is a group, and where its processes may run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.engines.memcached import Memcached
from deploy.linux.service_process import affinities
from tests.live.conftest import PATIENCE

LONG = ["stress-ng", "--cpu", "{threads}", "--cpu-ops", "100000000"]
EVERYWHERE = tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture
def group_file(scenario_file: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a scenario whose service is a group of two."""

    def write(commands: dict[str, list[str]], **service: Any) -> Path:
        path = scenario_file(**commands)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        content["service"] |= {"members": 2, "threads": 3} | service
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    return write


def others(servers: Sequence[Memcached]) -> list[str]:
    """The options that name the other processes of a group."""
    return [word for one in servers for word in ("--member", f"{one.host}:{one.port}")]


def await_on(servers: Sequence[Memcached], cores: tuple[int, ...]) -> None:
    """Wait until all threads of all processes may run on a set, and nowhere else."""
    give_up_s = time.monotonic() + 30.0 * PATIENCE
    while any(set(affinities(one.pid).values()) != {cores} for one in servers):
        assert time.monotonic() < give_up_s, [affinities(one.pid) for one in servers]
        time.sleep(0.01)
