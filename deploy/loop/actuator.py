"""
The actuator: makes the machine hold an allocation, and knows what it holds.

memcached's vCPUs and the jobs' vCPUs, weights, quotas and pauses are written at once by the loop;
making and removing go to a worker thread, and the ends of jobs to another (`deploy.jobs.job_run`),
so that Docker never holds memcached up, nor what follows a job.

Attempts are made ahead, while memcached has time to spare, and wait at gates that the loop opens
when their start is decided. Making and removing take turns, with rests between them.

When sets move, memcached first gets what is new to it, then the jobs leave, then memcached leaves,
then the jobs come: nobody is ever without a vCPU, and nobody who competes with memcached is on its
vCPUs.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from pathlib import PurePosixPath

from deploy.jobs import precedence
from deploy.jobs.job_context import JobContext
from deploy.jobs.job_run import JobRun
from deploy.jobs.runtimes import Runtime
from deploy.linux import service_process
from deploy.linux.cgroups import Hierarchy, JobGroup
from deploy.linux.group_sensor import process_names
from deploy.linux.readiness import Awaited
from deploy.linux.sensors import VcpuClock
from deploy.loop.spreading import LOOK_S, Cores, Spreading
from deploy.records.recorder import MEMCACHED, Recorder
from deploy.records.state import JobRecord, ServiceRecord, State, StateFolder, service_record
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.errors import InputError, fault
from env.scenario import Job, Scenario

NOT_FIRST = "does not go before other programs"

TIDY_EVERY_S = 1.0
"""How often jobs that have pinned themselves are looked for, as programs do when they begin."""

SAVE_EVERY_S = 1.0
"""How often a state that could not be written is tried again."""

REST, LONGEST_REST_S = 2.0, 2.0
"""How long nothing is started or removed after a start or removal: in multiples of what that took,
and at most [s]. What the kernel does for a container yields to no weight (docs/decisions.md)."""

GROUP_LIMIT_S = 2.0
"""How long the control group of a job that is over may stay in use."""

RESERVE = 16
"""File descriptors kept for the end: who has none left can undo nothing."""

LONGEST_HOLD_S = 10.0
"""How long a decided start whose attempt is not made yet waits at most for memcached to have time
to spare (docs/decisions.md)."""

LONGEST_KEPT_S = 60.0
"""How long the removal of a job's ended container waits for that at most."""


class Actuator:
    """
    One machine's memcached and jobs.

    :param scenario: the problem
    :param runtime: runs the jobs
    :param folder: the state folder
    :param state: the deployment, new or taken over
    :param group_for: makes a job's control group; None where groups cannot be written
    :param recorder: is told what happens
    :param vcpus: busy time of the vCPUs
    :param lifts: how control groups are mounted, where memcached's is to go before others
    """

    def __init__(
        self,
        scenario: Scenario,
        runtime: Runtime,
        folder: StateFolder,
        state: State,
        group_for: Callable[[str], JobGroup] | None,
        recorder: Recorder,
        vcpus: VcpuClock,
        lifts: Hierarchy | None = None,
    ):
        worker, attendant = (ThreadPoolExecutor(1, name) for name in ("worker", "attendant"))
        self._workers = worker, attendant
        for one in self._workers:
            one.submit(bool)  # a thread that cannot be had is known before anything is touched
        self._vcpus = tuple(range(scenario.machine.vcpus))
        self._has_groups = group_for is not None
        self._context = JobContext(
            runtime, worker, attendant, folder, state, group_for, recorder, self._ahead(())
        )
        self.state = state
        self.jobs = {
            job.name: JobRun(job, state.jobs.setdefault(job.name, JobRecord()), self._context)
            for job in scenario.jobs
        }
        self._recorder = recorder
        self._lifts = lifts
        self._service: tuple[service_process.Identity, ...] = ()
        service = scenario.service
        self._service_names = process_names(service.processes, service.proxy is not None)
        self._leaving: dict[str, Future[None]] = {}  # what is left of jobs that are over
        self._stuck: set[str] = set()  # those of which something cannot be removed
        self._allocated: dict[str, Cores] = {}  # the vCPUs of each job, as it was last said
        self._spreading = Spreading(vcpus)
        self._service_wanted: tuple[int, ...] = ()
        self._service_written: tuple[int, ...] = ()
        self._unlifted: list[ServiceRecord] = []  # those that are still to be put first
        self._service_unsaved = False  # whether the vCPUs that it had are still to be written down
        self._complaint = ""
        self._other_changes = 0  # memcached's, and those of jobs that are gone
        self._save_at_s = self._tidy_at_s = self._look_at_s = 0.0
        self._begun = False  # nothing is made before `apply` has said which vCPUs memcached has
        self._holds = False  # whether a decided start waits for its turn
        self._in_turn: JobRun | None = None
        self._turn_from_s = self._rest_until_s = self._held_from_s = 0.0
        self.stirred = 0  # how often a job may have come to stand otherwise
        # Jobs that are not as wanted; the others stay as they are until something happens.
        self._unsettled = list(self.jobs.values())
        self._ends: dict[int, JobRun] = {}  # what becomes readable when a job ends
        self._ending: list[object] = []  # the attempts that it tells of
        self._awaited = Awaited()
        self._reserve = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(RESERVE)]

    @property
    def changes(self) -> int:
        """How many changes the machine has seen."""
        return self._other_changes + sum(job.changes for job in self.jobs.values())

    @property
    def context(self) -> JobContext:
        """What all jobs share."""
        return self._context

    def take_over(self, now_s: float) -> None:
        """
        Find what an earlier loop left running; to be called before the first `apply`.

        :param now_s: since the run started [s]
        :raises RuntimeUnavailableError: if whoever runs the jobs cannot be asked
        :raises OSError: if a control group cannot be made
        """
        runtime = self._context.runtime
        for run in self.jobs.values():
            record = run.record
            if record.exit_code is not None or record.attempts == 0:
                continue
            run.make_group()
            found = runtime.find(run.attempt(record.attempts))
            if found is not None:
                run.adopt(found, now_s)
            elif record.failures < record.attempts:
                # It never ran; should it do so yet, it is found by its number.
                record.attempts, record.opened = record.attempts - 1, False

    def admit(self, job: Job) -> None:
        """
        Take one more job; an attempt of it is made ahead, as of the others.

        :param job: one of a queue
        """
        record = self.state.jobs.setdefault(job.name, JobRecord())
        self.adopt(JobRun(job, record, self._context))

    def adopt(self, run: JobRun) -> None:
        """
        Take one more job that somebody else looks after.

        :param run: the job
        """
        self.jobs[run.job.name] = run
        self._unsettle_all()

    def cancel(self, name: str) -> None:
        """
        Have a job ended for good.

        :param name: the job's
        """
        self.jobs[name].cancel()
        self._unsettle_all()

    def dismiss(self, name: str) -> bool:
        """
        Forget a job that is over, once nothing of it is left on the machine.

        :param name: the job's
        :return: whether it is forgotten; to be called again until it is
        """
        leaving = self._leaving.pop(name, None)
        if leaving is None:
            group = self.jobs[name].record.group
            leaving = self._context.worker.submit(self._remove_traces, name, group)
        if not leaving.done():
            self._leaving[name] = leaving
            return False
        if (error := leaving.exception()) is not None:
            if name not in self._stuck:
                self._context.note(name, f"is not forgotten yet: {error}; tried again")
            self._stuck.add(name)
            return False
        self._stuck.discard(name)
        self._other_changes += self.jobs[name].changes
        del self.jobs[name], self.state.jobs[name]
        self._allocated.pop(name, None)
        self._context.save()
        self._unsettle_all()
        return True

    def follow(self, who: tuple[service_process.Identity, ...]) -> None:
        """
        Turn to memcached's processes: remember the vCPUs they have, and give them theirs.

        :param who: all of them, new or known
        """
        if who == self._service:
            return
        self._service, self._service_written = (), ()
        known = {(record.pid, record.started): record for record in self.state.service}
        records, news = [], []
        for place, one in enumerate(who):
            record = known.get((one.pid, one.started))
            if record is None:
                try:
                    record = service_record(one)
                    name = self._service_names[place]
                    news.append(f"{name}: process {one.pid}" if name else f"process {one.pid}")
                except OSError:
                    if service_process.is_alive(one) or not self.state.service:
                        return  # it is tried again
                    record = self.state.service[place]  # it has ended, as the one before it
            records.append(record)
        if news:
            for line in news:
                self._context.note(MEMCACHED, line)
            self._weigh(records)
            self.state.service = records
            self._context.save()
            self._service_unsaved = self._context.unsaved
        self._service = who
        self._unlifted = [record for record in records if record.weighing is not None]
        self._write_service(self._service_wanted)

    def _weigh(self, records: Sequence[ServiceRecord]) -> None:
        """Note how memcached stands, and put back the groups that it is in no more."""
        if self._lifts is None:
            return
        before = {each.weighing.group: each for each in self.state.service if each.weighing}
        own = {record.pid for record in records}
        for record in records:
            if record.weighing is not None or not service_process.is_alive(record.who):
                continue
            try:
                found = precedence.weighed(record.pid, self._lifts, own)
            except (InputError, OSError) as error:
                self._context.note(MEMCACHED, f"{NOT_FIRST}: {fault(error)}")
                continue
            known = before.get(found.group)  # what it weighs now may be our doing
            record.weighing = known.weighing if known is not None else found
        held = {record.weighing.group for record in records if record.weighing}
        for record in before.values():
            assert record.weighing is not None
            if record.weighing.group in held:
                continue
            if trouble := precedence.put_back(record.who, record.weighing):
                self._context.note(MEMCACHED, trouble)

    def look_after_service(self) -> None:
        """Have memcached moved again if somebody else has moved it, as a kubelet may."""
        written = set(self._service_written)
        for one in self._service if written else ():
            with contextlib.suppress(OSError):  # it may be gone
                if os.sched_getaffinity(one.pid) != written:
                    self._service_written = ()

    def apply(self, allocation: Allocation) -> None:
        """
        Make the machine hold an allocation; what Docker has to do follows in `poll`.

        Within the vCPUs that background jobs are allocated each may have one of its own, which it
        keeps as long as it is allocated that (`deploy.loop.spreading`).

        :param allocation: who holds what; jobs it does not name stay as they are
        """
        self._unsettle_all()
        self._begun = True
        old, new = set(self._service_written), set(allocation.service_cores)
        self._service_wanted = tuple(allocation.service_cores)
        self._context.ahead = self._ahead(allocation.service_cores)
        if old and new - old and old - new:
            self._write_service(tuple(sorted(old | new)))
        elif new - old:
            self._write_service(self._service_wanted)
        for name, wanted in allocation.jobs.items():
            self._allocated[name] = wanted.cores
            if wanted.state in (JobState.RUNNING, JobState.PAUSED):
                self.jobs[name].want(wanted)
        self._move(self._running())
        coming: list[JobRun] = []
        for name, wanted in allocation.jobs.items():
            run = self.jobs[name]
            if wanted.weight == Weight.NORMAL and (old - new) & set(wanted.cores):
                coming.append(run)
            else:
                run.write()
        self._write_service(self._service_wanted)
        for run in coming:
            run.write()

    def poll(self, now_s: float, slack: bool = True) -> None:
        """
        Pick up what has been done, hand out what is to be done, and make good what was not.

        :param now_s: since the run started [s]
        :param slack: whether memcached has CPU time to spare; what is to be made waits for it
        """
        self._write_service(self._service_wanted)
        if self._unsettled:
            self._go_on(now_s, slack)
        if now_s >= self._tidy_at_s:
            self._tidy_at_s = now_s + TIDY_EVERY_S
            for run in self.jobs.values():
                run.unpin()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._spread(now_s)
        if self._context.unsaved and now_s >= self._save_at_s:
            self._save_at_s = now_s + SAVE_EVERY_S
            self._context.save()

    def wait(self, timeout_s: float) -> None:
        """
        Sleep, but no longer than until a job ends.

        :param timeout_s: the longest sleep [s]
        """
        ended = self._awaited.wait(timeout_s)
        for file in ended:
            self._ends[file].note_end()
        if ended:
            self._unsettle_all()
            self._await_ends()

    def forget_written(self) -> None:
        """Write everything anew: the guardian may have changed things."""
        self._unsettle_all()
        self._service_written = ()
        for run in self.jobs.values():
            run.forget_written()

    def close(self) -> None:
        """
        Let the workers finish their present calls, and nothing more; close what was kept open.

        What is undone from now on finds file descriptors that were held in reserve.
        """
        while self._reserve:
            os.close(self._reserve.pop())
        self._awaited.close()
        for one in self._workers:
            one.shutdown(wait=True, cancel_futures=True)
        for run in self.jobs.values():
            run.close()

    def _ahead(self, service_cores: Sequence[int]) -> JobAllocation:
        """
        Where attempts are made ahead: apart from memcached, else in the background.

        On a machine that is busy the idle class may not run for seconds, and the worker with it.
        """
        apart = tuple(core for core in self._vcpus if core not in service_cores)
        if apart:
            return JobAllocation(cores=apart)
        # Without groups a user may not take a process out of the background again.
        weight = Weight.BACKGROUND if self._has_groups else Weight.NORMAL
        return JobAllocation(cores=self._vcpus, weight=weight)

    def _unsettle_all(self) -> None:
        """Something has happened: any job may have to change."""
        self.stirred += 1
        self._unsettled = list(self.jobs.values())

    def _go_on(self, now_s: float, slack: bool) -> None:
        """Bring the jobs nearer to what is wanted."""
        self.stirred += 1
        for run in self._unsettled:
            run.advance(now_s)
            run.write()
        self._take_turns(now_s, slack)
        self._await_ends()
        self._unsettled = [run for run in self._unsettled if not run.settled]

    def _spread(self, now_s: float) -> None:
        """
        Have background jobs on a vCPU each where the kernel idles one.

        One that is not there yet takes nothing: until all have begun, all have what they were
        allocated. Nobody here knows when a pod ends, nor how many threads it has: pods are left
        as they are.
        """
        running = self._running()
        runs = [self.jobs[name] for name in running]
        there = all(run.record.opened and run.ended_file() >= 0 for run in runs)
        self._spreading.look(running if there else {}, now_s)
        if self._move(running):
            self._unsettle_all()

    def _running(self) -> dict[str, JobAllocation]:
        """The jobs that are to run, with all vCPUs that they were allocated."""
        return {
            name: replace(run.wanted, cores=self._allocated.get(name, run.wanted.cores))
            for name, run in self.jobs.items()
            if run.wanted.state == JobState.RUNNING and run.record.exit_code is None
        }

    def _move(self, running: Mapping[str, JobAllocation]) -> bool:
        """Want each on its own vCPU, or on all it was allocated; whether anybody is to move."""
        own, moved = self._spreading.own(running), False
        for name, allocated in running.items():
            cores = own.get(name, allocated.cores)
            if cores != self.jobs[name].wanted.cores:
                self.jobs[name].want(replace(allocated, cores=cores))
                moved = True
        return moved

    def _await_ends(self) -> None:
        """Await the ends of the attempts there are now."""
        self._ends = {run.ended_file(): run for run in self.jobs.values() if run.ended_file() >= 0}
        ending: list[object] = [run.instance for run in self._ends.values()]
        if any(one is not other for one, other in zip_longest(ending, self._ending)):
            self._ending = ending
            self._awaited.replace(self._ends)

    def _take_turns(self, now_s: float, slack: bool) -> None:
        """
        Make or remove one at a time: decided starts, what is made ahead, removals.

        A removal, which may take Docker seconds, waits for memcached as what is made ahead does.
        """
        if self._in_turn is not None:
            if self._in_turn.in_turn:
                return
            took_s = now_s - self._turn_from_s
            self._rest_until_s = now_s + min(REST * took_s, LONGEST_REST_S)
            self._in_turn = None
        # `_holds` is the last poll's: a start is held only from when it could have begun.
        if not self._holds or now_s < self._rest_until_s:
            self._held_from_s = now_s
        waiting = [run for run in self._unsettled if run.needs_turn(now_s)]
        decided = [run for run in waiting if run.decided_s is not None]
        decided.sort(key=lambda run: run.decided_s or 0.0)
        ahead = [run for run in waiting if run.decided_s is None and not run.removes_next]
        removed = [run for run in waiting if run.removes_next]
        self._holds = bool(decided)
        if now_s < self._rest_until_s:
            return
        all_over = all(run.record.exit_code is not None for run in self.jobs.values())
        turns = [run for run in removed if all_over or now_s >= run.kept_from_s + LONGEST_KEPT_S]
        if slack or (decided and now_s >= self._held_from_s + LONGEST_HOLD_S):
            turns = [*decided, *(ahead if self._begun else []), *removed]
        for run in turns[:1]:
            self._in_turn, self._turn_from_s = run, now_s
            run.take_turn(now_s)

    def _remove_traces(self, name: str, path: str) -> None:
        """Runs in the worker: remove the control group and the proofs of a job that is over."""
        context = self._context
        if context.group_for is not None and path:
            group = replace(context.group_for(name), path=PurePosixPath(path))
            # The worker has others to serve, and is asked again and again.
            give_up_s = time.monotonic() + (0.0 if name in self._stuck else GROUP_LIMIT_S)
            group.remove()
            while group.exists():  # a dying process still counts as a member for a moment
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"its control group {path} cannot be removed")
                time.sleep(0.02)
                group.remove()
        context.folder.forget_job(context.state.nonce, name)

    def _write_service(self, cores: tuple[int, ...]) -> None:
        if not self._service or not cores or cores == self._service_written:
            return
        if self._service_unsaved and self._context.unsaved:  # nobody could give its vCPUs back
            return
        self._service_unsaved = False
        # The number of one that is gone may be another's.
        living = [who for who in self._service if service_process.is_alive(who)]
        if not living:
            return
        try:
            for who in living:
                service_process.pin(who.pid, cores)
        except OSError as error:
            if fault(error) != self._complaint:
                self._complaint = fault(error)
                self._context.note(MEMCACHED, f"cannot be moved: {fault(error)}")
            return
        self._complaint = ""
        self._service_written = cores
        self._lift()
        self._other_changes += 1
        self._recorder.event("update_cores", MEMCACHED, cores)

    def _lift(self) -> None:
        """Have memcached go before other programs, once it is known what is to be put back."""
        while self._unlifted:
            record = self._unlifted.pop()
            assert record.weighing is not None
            if not service_process.is_alive(record.who):  # its number may be another's
                continue
            try:
                precedence.put_first(record.pid, record.weighing)
            except OSError as error:
                self._context.note(MEMCACHED, f"{NOT_FIRST}: {fault(error)}")
