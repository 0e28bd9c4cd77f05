"""
A testbed on the live machine: memcached, a load, and something beside it, all of it our own.

Everything measured runs in one control group that outweighs the rest of the machine, so that other
processes disturb it as little as background work would; inside, memcached and what runs beside it
are siblings, as on a deployed machine. What was started is stopped when the `with` block ends,
however it ends.

    with open_testbed(folder) as testbed, testbed.serving(threads=2, cores=(0,)) as server:
        rows = testbed.sweep(server, [10_000, 50_000], Timing(1.0, 0.3))
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path, PurePosixPath
from statistics import harmonic_mean

from deploy.engines import memcached
from deploy.engines.images import docker_daemon
from deploy.engines.memcached import Memcached
from deploy.jobs import gate, precedence
from deploy.jobs.containers import DockerRuntime, connect
from deploy.jobs.runtimes import (
    Attempt,
    Instance,
    JobFailedError,
    ProcessRuntime,
    Runtime,
    RuntimeUnavailableError,
)
from deploy.linux import realtime
from deploy.linux.cgroups import (
    DEFAULT_WEIGHT,
    Hierarchy,
    JobGroup,
    find_hierarchy,
)
from deploy.linux.counters import DescendantCounters
from deploy.linux.readiness import await_readable
from deploy.linux.sensors import ThreadClock, VcpuClock, Yardstick
from deploy.linux.service_process import identify, pin
from deploy.linux.signals import held
from deploy.linux.standing import ahead
from deploy.linux.stats_connection import StatsConnection
from deploy.load import generator
from deploy.load.dynamic_load import Client
from deploy.load.keys import load_records
from deploy.records import proof
from deploy.records.state import Weighing
from env.allocation import Weight
from env.errors import InputError, fault
from env.scenario import Job
from env.simulator.load import LoadTrace
from training.measuring.preflight import needs_docker
from training.measuring.pressure import Beside
from training.measuring.readings import (
    FOREIGN_LIMIT,
    Counters,
    cpu_s,
    latency_row,
    requests_served,
    stolen_s,
)

GROUP = "coretide-characterise"
UNPIN_EVERY_S = 0.1
"""How often a job that has pinned itself is looked for: what is measured lasts a second."""

HEAVIEST = {1: 262144, 2: 10000}  # largest cpu.shares and cpu.weight
BUSY_LIMIT = 0.25  # of the machine's CPU: with more in use by others nothing is measured


@dataclass(frozen=True)
class Timing:
    """
    How long a point is measured.

    :param step_s: length of a load level [s]
    :param warm_s: cut from its start [s]
    """

    step_s: float
    warm_s: float


class Neighbour:
    """
    Something that runs beside, and is started again when it ends.

    :param testbed: the testbed to run on
    :param what: the job to keep running, with its threads, vCPUs and weight
    :param group: its control group
    """

    def __init__(self, testbed: Testbed, what: Beside, group: JobGroup):
        self.what = what
        self.group = group
        self._testbed = testbed
        self._instance = testbed.start(what.job, what.threads, what.cores, what.weight, group)

    @property
    def ended(self) -> int:
        """Becomes readable when it has ended."""
        return self._instance.ended

    def pause(self) -> None:
        """Stop it from running for a while."""
        self.group.set_frozen(True)

    def resume(self) -> None:
        """Let it run again."""
        self.group.set_frozen(False)

    def keep_going(self) -> None:
        """Start it again if it has ended."""
        if await_readable([self.ended], 0.0):
            what = self.what
            with held():
                self.stop()
                self._instance = self._testbed.start(
                    what.job, what.threads, what.cores, what.weight, self.group
                )

    def stop(self) -> None:
        """End it; version 1 of control groups kills nobody who is paused."""
        self.resume()
        self._testbed._runtime_of(self.what.job).remove(self._instance)
        os.close(self._instance.ended)


class Testbed:
    """
    See the module; made by `open_testbed`.

    :param hierarchy: the control group hierarchy of this machine
    :param outer: the group of everything measured
    :param service: memcached's group, below it
    :param folder: for the jobs' proofs
    :param stack: gives back in the end what is only started when it is needed
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        outer: JobGroup,
        service: JobGroup,
        folder: Path,
        stack: contextlib.ExitStack,
    ):
        self.processes = ProcessRuntime()
        self.client_cpu = realtime.last_cpu()
        self.vcpus = len(os.sched_getaffinity(0))
        self._hierarchy = hierarchy
        self._outer = outer
        self._service = service
        self._folder = folder
        self._stack = stack
        self._attempts = 0
        self.clock = VcpuClock(self.client_cpu + 1, hierarchy.mounts.get("cpuacct"))

    @functools.cached_property
    def containers(self) -> DockerRuntime:
        """
        The machine's Docker daemon, or one of our own that is started now.

        :raises InputError: if there is none
        """
        return DockerRuntime(self._hierarchy, f"characterise-{os.getpid()}", self._docker_url)

    @functools.cached_property
    def _docker_url(self) -> str:
        return self._stack.enter_context(docker_daemon())

    @property
    def background(self) -> str:
        """The file that puts jobs into the background on this kernel."""
        return self._service.background

    @functools.cached_property
    def precedence(self) -> str:
        """What memcached goes before other programs by on this kernel: a class, or a file."""
        with memcached.running(threads=1) as server:
            self._service.join(server.pid)
            return precedence.name_of(self.standing(server))

    def require_images(self, jobs: Sequence[Job]) -> None:
        """
        Check that all jobs can be started.

        :param jobs: those whose programs are not on this machine are looked for in Docker
        :raises InputError: if there is no Docker, or it does not have an image
        """
        for job in jobs:
            if needs_docker(job):
                with contextlib.closing(connect(self._docker_url)) as client:
                    if not client.images.list(job.image):
                        raise InputError(
                            f"job {job.name}: {job.command[0]} is not on this machine, nor image "
                            f"{job.image} in Docker; docker pull {job.image}"
                        )

    def _runtime_of(self, job: Job) -> Runtime:
        """Processes where the job's program is on this machine, else Docker."""
        return self.containers if needs_docker(job) else self.processes

    @contextlib.contextmanager
    def serving(
        self, threads: int, cores: tuple[int, ...], first: bool = False
    ) -> Iterator[Memcached]:
        """
        A memcached with all records, on some vCPUs.

        :param threads: worker threads
        :param cores: its vCPUs
        :param first: whether it goes before other programs by what a deployment uses; at
            saturation the kernel's limit for real-time then stops it for 50 ms in each second
        """
        with memcached.running(threads) as server:
            self._service.join(server.pid)
            pin(server.pid, cores)
            load_records(server.host, server.port)
            if first:
                precedence.put_first(server.pid, self.standing(server))
            yield server

    def standing(self, server: Memcached) -> Weighing:
        """
        How memcached stands, and so what it may go before other programs by.

        :param server: a running one
        :raises OSError: if it is gone
        """
        return precedence.weighed(server.pid, self._hierarchy, {server.pid})

    @contextlib.contextmanager
    def beside(self, what: Beside | None) -> Iterator[Neighbour | None]:
        """
        Keep something running, as a sibling of memcached's group.

        :param what: the job to keep running; None keeps nothing running
        """
        if what is None:
            yield None
            return
        with self.job_group(f"beside-{what.job.name}") as group, contextlib.ExitStack() as stack:
            with held():  # what is started is known before anything may end this program
                neighbour = Neighbour(self, what, group)
                stack.callback(neighbour.stop)
            yield neighbour

    def sweep(
        self,
        server: Memcached,
        targets: Sequence[int],
        timing: Timing,
        cores: tuple[int, ...],
        neighbour: Neighbour | None = None,
        connections: int = generator.CONNECTIONS,
    ) -> list[dict[str, float]]:
        """
        Measure memcached at one load after another.

        :param server: a running one
        :param targets: loads in rising order: past saturation the client has a backlog to send
        :param timing: of each load level
        :param cores: memcached's vCPUs
        :param neighbour: what runs beside it
        :param connections: of the load
        :return: per load what `training.analysis.findings` calls a row of the latency table, and
            how trustworthy it is
        :raises InputError: if the load generator or the probe ends
        """
        # A level more at each end: the client may start late, and it ends with its last one.
        levels = [targets[0], *targets, targets[-1]]
        client = self.client(server, LoadTrace.explicit(levels, timing.step_s), connections)
        stats = StatsConnection(server.host, server.port)
        clocks: list[ThreadClock] = []
        rows = []
        try:
            children = (client.generator, client.probe.process)
            clocks = [ThreadClock(identify(child.pid), time.monotonic()) for child in children]
            client.row(0)
            for index, target in enumerate(targets, start=1):
                start_s = client.start_s + index * timing.step_s
                sleep_until(start_s + timing.warm_s)
                before = self._count(stats, clocks, neighbour)
                sleep_until(start_s + timing.step_s - 0.01)
                after = self._count(stats, clocks, neighbour)
                client.row(index)
                between = client.probe.between(before.time_s, after.time_s)
                late = client.late_ticks[-1]
                if after.time_s > start_s + timing.step_s:  # this program was held up
                    late = 1.0
                rows.append(
                    latency_row(target, between, before, after, cores, self.client_cpu, late)
                )
                if neighbour is not None:
                    neighbour.keep_going()
        finally:
            client.stop()
            stats.close()
            for clock in clocks:
                clock.close()
        return rows

    def client(
        self, server: Memcached, trace: LoadTrace, connections: int = generator.CONNECTIONS
    ) -> Client:
        """
        Start the load and its probe, on time even on a busy machine.

        :param server: a running memcached
        :param trace: the load
        :param connections: of the load
        """
        # Children that inherit the priority are there in time.
        with ahead(children=True):
            return Client(server.host, server.port, trace, self.client_cpu, connections)

    def time_job(
        self,
        job: Job,
        threads: int,
        cores: tuple[int, ...],
        limit_s: float = math.inf,
        neighbour: Neighbour | None = None,
        weight: Weight = Weight.NORMAL,
    ) -> dict[str, float]:
        """
        Run a job to its end.

        :param job: the job to run
        :param threads: its thread count
        :param cores: its vCPUs
        :param limit_s: the job is ended after this time [s]
        :param neighbour: what runs beside it, and is kept running
        :param weight: its weight
        :return: real_s (NaN if it did not end in time), cpu_s by its control group, cycles and
            instructions (NaN where nothing counts them), start_s, foreign_cores, disturbed, and
            yardstick_us, see `Yardstick`
        :raises InputError: if it fails
        """
        runtime = self._runtime_of(job)
        beside_here = neighbour if neighbour and set(neighbour.what.cores) <= set(cores) else None
        counted: list[DescendantCounters] = []
        with self.job_group(f"job-{job.name}") as group, contextlib.ExitStack() as stack:

            def count(pid: int) -> None:
                with contextlib.suppress(OSError):  # this machine has no such counters
                    counted.append(DescendantCounters(pid))
                    stack.callback(counted[-1].close)

            begun_s = time.monotonic()
            with held():  # see `beside`
                instance = self.start(job, threads, cores, weight, group, count)
                stack.callback(os.close, instance.ended)
                stack.callback(runtime.remove, instance)
            # Whoever starts a job also takes time, which disturbs nothing.
            before, started_s = self._taken_s(), time.monotonic()
            beside_s = beside_here.group.cpu_s() if beside_here else 0.0
            service_s = self._service.cpu_s()
            ended, yardsticks_us = self._await_end(instance, cores, limit_s, neighbour)
            after, ended_s = self._taken_s(), time.monotonic()
            cpu_s = group.cpu_s()
            known_s = cpu_s + self._service.cpu_s() - service_s
            known_s += beside_here.group.cpu_s() - beside_s if beside_here else 0.0
            cycles, instructions = counted[0].read() if counted else (math.nan, math.nan)
            if ended:
                code, tail = runtime.outcome(instance)
                if code != 0:
                    raise InputError(f"job {job.name}: failed with {code}: {tail.strip()}")
        taken_s = sum(after[c] - before[c] for c in cores)
        foreign = max(taken_s - known_s, 0.0) / (ended_s - started_s)
        return {
            "real_s": ended_s - begun_s if ended else math.nan,
            "cpu_s": cpu_s,
            "cycles": cycles,
            "instructions": instructions,
            "start_s": started_s - begun_s,
            "foreign_cores": foreign,
            "yardstick_us": harmonic_mean(yardsticks_us),
            # One that does not end would not end if it were tried again.
            "disturbed": float(ended and foreign > FOREIGN_LIMIT * len(cores)),
        }

    def start(
        self,
        job: Job,
        threads: int,
        cores: tuple[int, ...],
        weight: Weight,
        group: JobGroup,
        before: Callable[[int], None] = lambda pid: None,
    ) -> Instance:
        """
        Start a job in a group.

        :param job: the job to start
        :param threads: its thread count
        :param cores: its vCPUs
        :param weight: its weight
        :param group: its control group
        :param before: is told its first process, which waits at its gate
        :raises InputError: if it cannot run
        """
        runtime = self._runtime_of(job)
        try:
            instance = runtime.start(self.attempt(job, group), cores, weight)
            require_running(runtime, instance)
            try:
                before(instance.pid)
                gate.await_passage(instance.attempt.folder, threads)
            except BaseException:
                runtime.remove(instance)
                raise
        except (JobFailedError, RuntimeUnavailableError, OSError) as error:
            raise InputError(f"job {job.name}: {fault(error)}") from error
        return instance

    def attempt(self, job: Job, group: JobGroup) -> Attempt:
        """
        One more try at a job, with a folder of its own.

        :param job: the job to try
        :param group: its control group
        """
        self._attempts += 1
        folder = self._folder / f"{job.name}-{self._attempts}"
        folder.mkdir(parents=True)
        proof.prepare(folder)
        gate.make(folder)
        return Attempt(job, self._attempts, folder, group)

    def foreign_share(self) -> float:
        """Share of the machine's CPU that other processes use, within a second."""
        before, own = self.clock.read(), self._outer.cpu_s() + time.process_time()
        begun_s = time.monotonic()
        time.sleep(1.0)
        used = sum(self.clock.read()) - sum(before)
        used -= self._outer.cpu_s() + time.process_time() - own
        return max(used, 0.0) / (time.monotonic() - begun_s) / len(before)

    @contextlib.contextmanager
    def job_group(self, name: str) -> Iterator[JobGroup]:
        """
        A job's control group, a sibling of memcached's, for the length of a `with` block.

        :param name: name of the group
        """
        group = JobGroup(
            self._hierarchy, self._outer.path / name, DEFAULT_WEIGHT[self._hierarchy.version]
        )
        group.create()
        try:
            yield group
        finally:
            group.remove()

    def _await_end(
        self, instance: Instance, cores: Sequence[int], limit_s: float, neighbour: Neighbour | None
    ) -> tuple[bool, list[float]]:
        """
        Wait for a job's end or its limit; unpin it as deployments do, and keep its company going.

        :return: whether it has ended, and what the yardstick read on its vCPUs meanwhile [µs]
        """
        yardstick = Yardstick(cores, every_s=0.0)
        seen_us = [yardstick.read()]
        give_up_s = time.monotonic() + limit_s
        while (left_s := give_up_s - time.monotonic()) > 0.0:
            files = [instance.ended, *([neighbour.ended] if neighbour else [])]
            ready = await_readable(files, min(left_s, UNPIN_EVERY_S))
            if instance.ended in ready:
                return True, seen_us
            seen_us.append(yardstick.read())
            if instance.placement is not None:
                with contextlib.suppress(OSError):  # it may be gone
                    instance.placement.unpin()
            if neighbour and ready:
                neighbour.keep_going()
        return False, seen_us

    def _taken_s(self) -> tuple[float, ...]:
        """Seconds that each vCPU was busy with anything, or that the hypervisor took."""
        busy = self.clock.read()
        return tuple(map(add, busy, stolen_s(len(busy))))

    def _count(
        self, stats: StatsConnection, clocks: Sequence[ThreadClock], neighbour: Neighbour | None
    ) -> Counters:
        """What has added up so far; the last of the client's clocks is its probe's."""
        now_s, requests = requests_served(stats)
        return Counters(
            now_s,
            requests,
            self._service.cpu_s(),
            neighbour.group.cpu_s() if neighbour else 0.0,
            cpu_s(clocks, now_s) + time.process_time(),
            cpu_s(clocks[-1:], now_s),
            self._taken_s(),
        )


@contextlib.contextmanager
def open_testbed(folder: Path, despite_load: bool = False) -> Iterator[Testbed]:
    """
    Check the machine, then set the testbed up.

    :param folder: for the jobs' proofs; made, and removed in the end
    :param despite_load: measure although other processes use the machine
    :raises InputError: one line: control groups may not be written, or the machine is busy
    """
    try:
        hierarchy = find_hierarchy()
    except OSError as error:
        raise InputError(f"control groups: {fault(error)}") from error
    version = hierarchy.version
    folder = folder.resolve()  # jobs run in a folder of their own
    end_leftovers(hierarchy)
    path = PurePosixPath(f"/{GROUP}-{os.getpid()}")
    outer = JobGroup(hierarchy, path, HEAVIEST[version])
    service = JobGroup(hierarchy, path / "memcached", DEFAULT_WEIGHT[version])
    with contextlib.ExitStack() as stack:
        stack.callback(outer.remove)
        stack.callback(service.remove)
        try:
            for group in (outer, service):
                group.create()
                group.set_weight(Weight.NORMAL)
                with contextlib.suppress(OSError):  # memcached goes first by weight then
                    group.allow_realtime()
        except OSError as error:
            raise InputError(
                f"control groups cannot be written ({error.strerror}); run as root"
            ) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # The group of what is measured outweighs all others, this program too.
        stack.enter_context(ahead())
        testbed = Testbed(hierarchy, outer, service, folder, stack)
        share = testbed.foreign_share()
        if share > BUSY_LIMIT and not despite_load:
            raise InputError(
                f"the machine is busy: other processes use {share:.0%} of its CPU; at most "
                f"{BUSY_LIMIT:.0%} may (or give --despite-load: points they disturb are marked)"
            )
        yield testbed


def end_leftovers(hierarchy: Hierarchy) -> None:
    """
    End what a characterisation left running that was killed without a chance to do so.

    :param hierarchy: the control group hierarchy of this machine
    """
    for folder in hierarchy.folder(PurePosixPath("/")).glob(f"{GROUP}-[0-9]*"):
        if not Path(f"/proc/{folder.name.rpartition('-')[2]}").exists():
            group = JobGroup(hierarchy, PurePosixPath("/") / folder.name, 0)
            ProcessRuntime().sweep([], [group])
            group.remove()


def require_running(runtime: Runtime, instance: Instance) -> None:
    """
    Make sure that a job which was just started can be followed to its end.

    :param runtime: who runs it
    :param instance: the job; removed if it is refused
    :raises InputError: if it has ended already; with its last lines
    """
    if instance.ended >= 0:
        return
    name = instance.attempt.job.name
    try:
        code, tail = runtime.outcome(instance)
        said = " ".join(tail.split()) or "it said nothing"
        raise InputError(f"job {name}: ended at once with exit code {code}: {said}")
    except RuntimeUnavailableError as error:
        raise InputError(f"job {name}: ended at once: {error}") from error
    finally:
        with contextlib.suppress(RuntimeUnavailableError):
            runtime.remove(instance)


def sleep_until(moment_s: float) -> None:
    """
    Sleep until a moment on the monotonic clock.

    :param moment_s: the moment, on the monotonic clock [s]; a past one does not wait
    """
    time.sleep(max(0.0, moment_s - time.monotonic()))
