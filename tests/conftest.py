"""What several test files share: a shipped problem, and a simulated host with its insides open."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import Phase, settings

from deploy.engines import daemon, images
from env.allocation import JobState, mask_of
from env.control import ControlState, control_fields
from env.reward import TERMS
from env.scenario import Scenario, load_scenario
from env.simulator import kernel
from env.simulator.machine import EpisodeFactory
from env.simulator.profile import Parameter, Profile, load_profile
from env.simulator.rates import next_event
from env.simulator.sensing import sense

# The same examples in every run; compiled functions have no deadline on their first call.
settings.register_profile(
    "coretide",
    deadline=None,
    derandomize=True,
    max_examples=50,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
settings.load_profile("coretide")

# A shell that starts the suite in the background has it ignore what a terminal's keys send, which
# every program that a test starts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


HICCUPS = ("stalls_per_s", "stall_s", "steals_per_s", "steal_s")


def with_hiccups(*values: float) -> Profile:
    """The public profile with other rates and lengths, in the order of `HICCUPS`; none: calm."""
    profile = load_profile("cca-2025")
    host = {name: value for name, value in profile.host.items() if name not in HICCUPS}
    for name, value in zip(HICCUPS, values, strict=False):
        if value:
            host[name] = Parameter(value=value, spread=0.3, source="a test")
    return profile.model_copy(update={"host": host})


@pytest.fixture(scope="session")
def scenario() -> Scenario:
    return load_scenario("cca-2025")


@pytest.fixture(scope="session")
def factory(scenario: Scenario) -> EpisodeFactory:
    return EpisodeFactory(scenario)


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[daemon.Daemon]:
    """A Docker daemon of our own that has the image of stress-ng, one for all tests."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("dockerd", *images.PROGRAMS))):
        pytest.skip("needs root, dockerd, stress-ng and busybox")
    folder = Path(tempfile.mkdtemp(prefix="ct-", dir="/tmp"))  # a short path, for its sockets
    with daemon.running(folder) as started:
        client = docker.DockerClient(base_url=started.url)
        images.ensure_stress_image(client)
        client.close()
        yield started


@pytest.fixture(scope="session")
def calm(scenario: Scenario) -> EpisodeFactory:
    return EpisodeFactory(scenario, with_hiccups())


@pytest.fixture
def rig(calm: EpisodeFactory) -> Rig:
    """A host without hiccups: nothing happens but what the test says."""
    return Rig(calm)


class Rig:
    """
    One simulated host whose fields can be read and set, advanced from event to event.

    `row` is what the kernel takes, `host` the same memory with fields as attributes.
    """

    def __init__(self, factory: EpisodeFactory):
        self.factory = factory
        self.scenario = factory.scenario
        self.hosts: Any = factory.new_hosts(1)
        self.host: Any = self.hosts.view(np.recarray)[0]
        if (
            os.environ.get("NUMBA_DISABLE_JIT") == "1"
        ):  # uncompiled, the kernel reads fields as attributes
            self.hosts = self.hosts.view(np.recarray)
        self.row: Any = self.hosts[0]
        self.targets = np.zeros(1)

    def begin(
        self, seed: int, targets: list[float] | None = None, work: float = 1.0
    ) -> npt.NDArray[np.float64]:
        """
        Start an episode.

        :param seed: of everything that is random
        :param targets: load of each interval [requests/s]; mcperf's own if none is given
        :param work: scale of the jobs' work, for short episodes
        """
        rng = np.random.default_rng(seed)
        traces = self.factory.new_targets(1)
        self.factory.begin(self.hosts, traces, 0, int(rng.integers(1, 2**31)), rng)
        self.targets = np.array(targets, np.float64) if targets else traces[0]
        self.row["work_left_s"] *= work
        kernel.start_episode(self.row, self.targets)
        return self.targets

    def observe(self) -> npt.NDArray[np.float32]:
        """The observation."""
        row = np.zeros(self.factory.observation_size, np.float32)
        kernel.observe(self.row, self.factory.table.rows, row)
        return row

    def legal(self) -> npt.NDArray[np.intp]:
        """Indices of the edits that the mask allows."""
        return np.flatnonzero(self.observe()[-len(self.factory.table) :] == 1.0)

    def step(self, edit: int, gamma: float = 1.0) -> tuple[int, npt.NDArray[np.float64]]:
        """One decision; how the episode stands, and the reward terms."""
        terms = np.zeros(len(TERMS))
        rows = self.factory.table.rows
        return kernel.step(self.row, rows, self.targets, edit, gamma, terms), terms

    def set_desired(self, service: tuple[int, ...], regulator_on: bool = True, **jobs: Any) -> None:
        """
        Desire an allocation and send it.

        :param service: memcached's vCPUs
        :param regulator_on: whether the regulator, and the guard with it, stand in between
        :param jobs: for a job's name its (state, vCPUs, weight), launched with 4 threads
        """
        self.row["desired_service"] = mask_of(service)
        for name, (state, cores, weight) in jobs.items():
            job = self.scenario.job_names.index(name)
            self.row["desired_state"][job] = int(state)
            self.row["desired_cores"][job] = mask_of(cores)
            self.row["desired_weight"][job] = int(weight)
            self.row["desired_threads"][job] = 4
        kernel.apply_desired(self.row, regulator_on)

    def desire_anything(self, rng: np.random.Generator) -> None:
        """Desire something random, most of what there is staying as it is."""
        row, n_vcpus = self.row, self.scenario.machine.vcpus
        if rng.random() < 0.3:
            choices = self.scenario.service.core_choices
            row["desired_service"] = mask_of(choices[rng.integers(len(choices))])
        for job, known in enumerate(self.scenario.jobs):
            if rng.random() < 0.15:
                paused = row["state"][job] == JobState.RUNNING and rng.random() < 0.4
                row["desired_state"][job] = JobState.PAUSED if paused else JobState.RUNNING
                row["desired_cores"][job] = rng.integers(1, 2**n_vcpus)
                row["desired_weight"][job] = rng.integers(2)
                row["desired_threads"][job] = rng.choice(known.threads)
                row["desired_quota"][job] = rng.choice([0.5, 1.5, np.inf])
        kernel.apply_desired(row, True)

    def events(self, until_s: float) -> Iterator[tuple[Any, Any]]:
        """
        Advance from event to event.

        :return: the host's fields before and after each stretch of constant rates
        """
        while self.row["now_s"] < until_s - 1e-9 and not self.done:
            before = self.row.copy()
            # An event may be due at once: the step must not be empty.
            event_s = min(until_s, next_event(self.row))
            until = max(event_s, self.row["now_s"] + 2e-9)
            kernel.advance(self.row, self.targets, until)
            yield before, self.row.copy()

    def walk(self, seed: int, limit_s: float = 1e9) -> Iterator[tuple[Any, Any]]:
        """An episode of random allocations, one stretch of constant rates after the other."""
        rng = np.random.default_rng(seed)
        while not self.done and self.row["now_s"] < min(limit_s, self.row["duration_s"]) - 1e-9:
            self.desire_anything(rng)
            wait_s = 0.025 * rng.integers(1, 80)
            yield from self.events(min(self.row["now_s"] + wait_s, self.row["duration_s"]))
            sense(self.row)

    @property
    def done(self) -> bool:
        return bool((self.row["true_state"] == JobState.DONE).all())

    def control(self) -> ControlState:
        """The control part of the host as the live loop would hold it: plain Python numbers."""
        jobs, vcpus = len(self.scenario.jobs), self.scenario.machine.vcpus
        names = [name for name, *_ in control_fields(jobs, vcpus)]
        return ControlState(**{name: self.row[name].tolist() for name in names})
