"""
Whatever signal ends a command at whatever moment, the machine is as it was found.

Moments are drawn from the length of an undisturbed run; now and then a second signal follows. What
a signal gave no chance to undo is made good by the guardian and by `--restore`.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import docker
import pytest
import yaml

from deploy.assembly import usable_hierarchy
from deploy.linux.service_process import affinities
from tests.live.conftest import PATIENCE, ROOT, needs_docker, needs_groups
from tests.live.endings.as_found import Machine, machine
from training.measuring.testbed import end_leftovers

SEED = 21
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FATAL = (signal.SIGKILL, signal.SIGQUIT)
FROM_A_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""These reach all that a terminal runs in the foreground."""

LENGTH_S = {"deploy": 2.7, "check": 2.2, "resume": 2.4, "restore": 0.8, "load": 4.0}
QUEUE_LENGTH_S = {"queue": 3.0, "submit": 0.8, "cancel": 0.8, "list": 0.8}
"""About how long the commands take undisturbed; the loop of a queue would go on."""

AGAIN = 0.3
"""How often a second signal follows, of any kind."""

AGAIN_WITHIN_S = 0.3
END_LIMIT_S = 90.0
"""Nobody promises less: where Docker hangs, an end tries for 50 s, and a start is tried again."""

GUARDED_S = 1.0
"""The guardian's promise."""

pytestmark = needs_groups


class Attacker:
    """
    Starts commands, ends them at random moments, and looks at what is left.

    :param found: the machine
    :param rng: draws moments and signals
    :param options: of every deployment
    """

    def __init__(self, found: Machine, rng: random.Random, options: list[str]):
        self.said, self.queue = found.report.parent / "said", found.report.parent / "queue"
        self.handed_in: list[str] = []
        self._found, self._rng = found, rng
        where = f"{found.server.host}:{found.server.port}"
        self.load = ["-m", "deploy.load", "--memcached", where, "--trace-seed", "1"]
        self.load += ["--qps-max", "10000", "--interval", "1", "--duration", "3"]
        places = ["--memcached", where, "--state", str(found.state), "--report", str(found.report)]
        self.deploy = [str(ROOT / "deploy.py"), "--no-pictures", *places, *options]

    def command(self, name: str) -> list[str]:
        """The arguments of Python for a command of `LENGTH_S`, all made ready."""
        if name in ("restore", "resume"):
            self.leave_a_deployment()
        more = [] if name == "deploy" else [f"--{name}"]
        return self.load if name == "load" else [*self.deploy, *more]

    def queue_command(self, name: str) -> list[str]:
        """The arguments of Python for a command of `QUEUE_LENGTH_S`, with a new job for it."""
        job = f"job-{len(self.handed_in)}"
        self.handed_in.append(job)
        self.queue.mkdir(exist_ok=True)
        threads = {"threads": [1], "memory_mib": 64}
        text = yaml.safe_dump({"name": job, "command": ["sleep", "0.5"], **threads})
        file = self.queue.parent / f"{job}.yaml"
        file.write_text(text)
        if name != "submit":
            shutil.copy(file, self.queue)
        more = {"submit": ["--submit", str(file)], "cancel": ["--cancel", job], "list": ["--list"]}
        policy = ["--policy", "first-come"]
        return [*self.deploy, *policy, "--queue", str(self.queue), *more.get(name, [])]

    def queued(self) -> Counter[str]:
        """In how many places of the queue each job is."""
        return Counter(path.stem for path in self.queue.rglob("*.yaml"))

    def leave_a_deployment(self) -> None:
        """One that was killed while its jobs ran."""
        process = self.start(self.deploy)
        give_up_s = time.monotonic() + END_LIMIT_S * PATIENCE
        while "radix start [" not in self.said.read_text():
            assert process.poll() is None and time.monotonic() < give_up_s, self.said.read_text()
            time.sleep(0.01)
        process.kill()
        process.wait()

    def start(self, arguments: list[str]) -> "subprocess.Popen[bytes]":
        """A program of Python in a session of its own; what it says is kept."""
        with self.said.open("wb") as said:
            return subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=self._found.environment,
                start_new_session=True,
            )

    def end(self, arguments: list[str], length_s: float, number: signal.Signals) -> tuple[int, str]:
        """
        Start a program and end it.

        :param arguments: of Python
        :param length_s: how long it takes undisturbed
        :param number: what ends it; with luck something else follows
        :return: its exit code, and what was done to it
        """
        moments_s = [self._rng.uniform(0.0, length_s) * PATIENCE]
        numbers = [number]
        if self._rng.random() < AGAIN:
            numbers.append(self._rng.choice((*HANDLED, *FATAL)))
            moments_s.append(self._rng.uniform(0.0, AGAIN_WITHIN_S))
        process = self.start(arguments)
        for each, pause_s in zip(numbers, moments_s, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(pause_s)
            if process.poll() is None:
                (os.killpg if each in FROM_A_TERMINAL else os.kill)(process.pid, each)
        done = ", ".join(
            f"{one.name} after {s:.3f} s" for one, s in zip(numbers, moments_s, strict=True)
        )
        return process.wait(END_LIMIT_S * PATIENCE), done

    def restore(self) -> int:
        """The exit code of `--restore`."""
        return self.start([*self.deploy, "--restore"]).wait(END_LIMIT_S * PATIENCE)


def assert_nothing_is_left(
    found: Machine, attacker: Attacker, name: str, number: signal.Signals
) -> None:
    """End a command at a random moment and compare."""
    before = found.snapshot()
    code, done = attacker.end(attacker.command(name), LENGTH_S[name], number)
    story = f"{name}: {done}: exit code {code}: {attacker.said.read_text()}"
    if -code in FATAL:
        give_up_s = time.monotonic() + GUARDED_S * PATIENCE
        while set(affinities(found.server.pid).values()) != {tuple(os.sched_getaffinity(0))}:
            assert time.monotonic() < give_up_s, f"memcached is still held: {story}"
            time.sleep(0.01)
    left_before = name in ("restore", "resume") and code != 0  # by the loop that was killed
    if name != "load" and (-code in FATAL or left_before):
        code = attacker.restore()
        story += f"\n--restore: {code}: {attacker.said.read_text()}"
        assert code == 0, story
    if name != "load":  # whose libraries take half a second to import
        assert f'File "{ROOT}/deploy' not in story
    assert found.difference(before) == {}, story


@pytest.fixture
def attacker_of(tmp_path, scenario_file, groups_file) -> Callable[..., Attacker]:
    """Makes an attacker of a machine, with two short jobs that start others."""

    def make(found: Machine, seed: str, *runtime: str) -> Attacker:
        jobs = {"dedup": ["stress-ng", "--cpu", "{threads}", "--timeout", "1"]}
        scenario = scenario_file(**jobs, radix=["sleep", "1.5"])
        options = ["--policy", str(groups_file), "--scenario", str(scenario), *runtime]
        return Attacker(found, random.Random(f"{SEED} {seed}"), options)

    return make


@pytest.fixture
def found(tmp_path) -> Iterator[Machine]:
    """A machine without containers."""
    with machine(tmp_path, list) as made:
        yield made


@pytest.mark.survival
@pytest.mark.parametrize("number", [*HANDLED, *FATAL])
@pytest.mark.parametrize(
    ("name", "times"), [("deploy", 12), ("check", 8), ("resume", 6), ("restore", 5), ("load", 3)]
)
def test_whenever_a_command_is_ended_the_machine_is_as_found(
    found, attacker_of, name, times, number
):
    attacker = attacker_of(found, f"{name} {number} {times}", "--runtime", "process", "--probe")
    for _ in range(times):
        assert_nothing_is_left(found, attacker, name, number)


@pytest.mark.survival
@pytest.mark.parametrize("number", [*HANDLED, *FATAL])
@pytest.mark.parametrize(
    ("name", "times"), [("queue", 5), ("submit", 3), ("cancel", 2), ("list", 1)]
)
def test_whenever_a_command_of_a_queue_is_ended_each_job_is_in_one_place(
    found, attacker_of, name, times, number
):
    attacker = attacker_of(found, f"{name} {number}", "--runtime", "process", "--probe")
    for _ in range(times):
        command, before = attacker.queue_command(name), found.snapshot()
        code, done = attacker.end(command, QUEUE_LENGTH_S[name], number)
        story = f"{name}: {done}: exit code {code}: {attacker.said.read_text()}"
        assert f'File "{ROOT}/deploy' not in story
        if -code in FATAL:
            assert attacker.restore() == 0, attacker.said.read_text()
        else:
            assert list(attacker.queue.glob(".*.yaml.*")) == [], story
        assert found.difference(before) == {}, story
        assert list(attacker.queue.glob("running/*")) == [], story
        places = attacker.queued()
        assert set(places.values()) <= {1} and set(places) <= set(attacker.handed_in), story
        lost = set(attacker.handed_in) - set(places)
        assert lost <= ({attacker.handed_in[-1]} if name == "submit" else set()), story
        if lost:
            attacker.handed_in.remove(lost.pop())


@pytest.fixture
def docking(tmp_path, docker_daemon) -> Iterator[Machine]:
    """A machine whose containers are looked at, too."""
    client = docker.DockerClient(base_url=docker_daemon.url)
    with contextlib.closing(client), machine(tmp_path, lambda: names_of(client)) as made:
        yield made


def names_of(client: docker.DockerClient) -> list[str]:
    """The containers there are, running or not."""
    return sorted(str(one["Names"]) for one in client.api.containers(all=True))


@needs_docker
@pytest.mark.survival
@pytest.mark.parametrize("number", [*HANDLED, *FATAL])
@pytest.mark.parametrize("name", ["deploy", "restore"])
def test_whenever_a_deployment_of_containers_is_ended_the_machine_is_as_found(
    docking, attacker_of, docker_daemon, name, number
):
    attacker = attacker_of(docking, f"docker {name} {number}", "--docker", docker_daemon.url)
    for _ in range(2):
        assert_nothing_is_left(docking, attacker, name, number)


@pytest.mark.survival
@pytest.mark.parametrize("number", [*HANDLED, signal.SIGKILL])
def test_whenever_a_measurement_is_ended_the_machine_is_as_found(
    found, attacker_of, tmp_path, number
):
    attacker = attacker_of(found, f"characterise {number}")
    measure = ["-m", "training.characterise", "--scenario", "local", "--quick", "--despite-load"]
    hierarchy = usable_hierarchy()
    groups = hierarchy.folder(PurePosixPath("/"))
    for each in range(3):
        before = found.snapshot()
        out = tmp_path / f"out-{each}"
        code, done = attacker.end([*measure, "--out", str(out)], 15.0, number)
        story = f"{done}: exit code {code}: {attacker.said.read_text()}"
        if code == -signal.SIGKILL:
            end_leftovers(hierarchy)  # as the next measurement does
        else:
            assert not (out / "work").exists(), story
        assert f'File "{ROOT}' not in story
        assert found.difference(before) == {}, story
        left = [path for path in groups.glob("coretide-characterise-*") if owner_is_gone(path)]
        assert left == [], story


def owner_is_gone(group: Path) -> bool:
    """Whether a measurement's group has outlived it; others may be measuring."""
    return not Path(f"/proc/{group.name.rpartition('-')[2]}").exists()


@needs_docker
@pytest.mark.survival
@pytest.mark.parametrize("number", HANDLED)
def test_whenever_a_demo_is_ended_the_machine_is_as_found(
    found, attacker_of, scenario_file, groups_file, tmp_path, number
):
    attacker = attacker_of(found, f"demo {number}")
    files = map(str, (scenario_file(), groups_file, tmp_path / "demo"))
    demo = ["-m", "tests.live.endings.short_demo", *files]
    for _ in range(2):
        before = found.snapshot()
        code, done = attacker.end(demo, 15.0, number)
        story = f"{done}: exit code {code}: {attacker.said.read_text()}"
        assert f'File "{ROOT}' not in story
        assert found.difference(before) == {}, story
