"""
One job on its way through its attempts: what it should have, what it has, what is to be done.

The loop's thread owns everything here. What may block is handed to another, one call per job at a
time; a later poll picks up its result. What failed is tried again after a pause.

An attempt is made ahead and waits at its gate (`deploy.jobs.gate`). The loop opens that itself once
the start is decided and written down; up to there the job counts as not started.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.jobs import gate
from deploy.jobs.job_context import Call, JobContext
from deploy.jobs.placement import Placement
from deploy.jobs.runtimes import Attempt, Instance, JobFailedError, RuntimeUnavailableError
from deploy.linux.cgroups import JobGroup
from deploy.records.proof import CANCELLED, begun, exit_code, proof_file
from deploy.records.recorder import failed_attempt
from deploy.records.state import JobRecord
from env.allocation import JobAllocation, JobState, Weight
from env.errors import fault
from env.scenario import Job

RETRIES = 3
"""How many failed attempts are followed by another one."""

SPARES = 3
"""How many attempts may die at their gate and be made anew without having failed."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
"""Pause before something that failed is tried again; it doubles each time."""

LATE_S = 2.0
"""A call that takes longer is reported."""

UNAVAILABLE_LIMIT_S = 60.0
"""An attempt fails if the runtime is unavailable for longer. A runtime that was told to start the
attempt must first say that it does not run, however long that takes: no job runs twice."""

GIVEN_UP = 125
"""Exit code of a job that never ran."""


@dataclass(frozen=True)
class _Written:
    """What a job's place was last given; an unknown value differs from every wanted one."""

    cores: tuple[int, ...] = ()
    weight: Weight | None = None
    quota: float | None = math.nan
    paused: bool | None = None


class JobRun:
    """
    One job.

    :param job: what the scenario says
    :param record: the job's part of the state file
    :param context: what all jobs of a deployment share
    """

    def __init__(self, job: Job, record: JobRecord, context: JobContext):
        self.job = job
        self.record = record
        self.wanted = JobAllocation()
        self.instance: Instance | None = None
        self.changes = 0
        self.decided_s: float | None = None  # since when the next start is wanted
        self.why = ""  # the last attempt that failed did
        self._context = context
        self._group: JobGroup | None = None
        self._written = _Written()
        self._paused_at_s: float | None = None
        self._passed = self._ended = False  # the attempt is past its gate, has ended
        self._spares = SPARES
        self._to_remove: Instance | None = None
        self.kept_from_s = 0.0  # since when that has been there; -inf if it may still run
        self._call: Call | None = None
        self._pause_s, self._retry_at_s = FIRST_PAUSE_S, 0.0
        self._away_since_s: float | None = None
        self._cancelled = self._has_pinned = False
        self._asked = False  # the runtime was told to start an attempt, and has not answered
        self._complaint = ""
        self._cpu_s = self._cpu_before_s = 0.0

    # --- what the machine shows ---

    @property
    def state(self) -> JobState:
        """Where the job stands; starting counts as running, as does ending."""
        if self.record.exit_code is not None:
            return JobState.DONE
        if self._paused_at_s is not None:
            return JobState.PAUSED
        return JobState.PENDING if self.wanted.state == JobState.PENDING else JobState.RUNNING

    @property
    def busy(self) -> bool:
        """Whether a call is under way or an ended attempt is left to be removed."""
        return self._call is not None or self._to_remove is not None

    @property
    def may_still_run(self) -> bool:
        """Of a job that is over: whether something of it may run. What has ended whole does not."""
        return self._call is not None or (self.removes_next and self.kept_from_s == -math.inf)

    @property
    def settled(self) -> bool:
        """Whether the machine is as wanted, and nothing is left to be done about it."""
        if self.busy or self._ended:
            return False
        if self.record.exit_code is not None:
            return True
        if self.decided_s is None:
            return not self._to_be_made
        paused = self.wanted.state == JobState.PAUSED
        wanted = _Written(self.wanted.cores, self.wanted.weight, self.wanted.quota, paused)
        return self._written == wanted and (self._passed or paused)

    def cpu_s(self) -> float:
        """CPU seconds this attempt has used; the last good reading where there is no new one."""
        instance = self.instance
        if instance is not None and instance.placement is not None and self.record.opened:
            with contextlib.suppress(OSError, ValueError):
                self._cpu_s = instance.placement.cpu_s() - self._cpu_before_s
        return self._cpu_s

    @property
    def in_turn(self) -> bool:
        """Whether the runtime is making or removing an attempt of the job."""
        return self._call is not None and self._call.what in ("making", "removing")

    def needs_turn(self, now_s: float) -> bool:
        """
        Whether an attempt of the job is to be made or removed, once it is the job's turn.

        :param now_s: since the run started [s]
        """
        if self._call is not None or now_s < self._retry_at_s:
            return False
        return self.removes_next or self._to_be_made

    @property
    def _to_be_made(self) -> bool:
        """Whether there is an attempt to be made, ahead or because its start is decided."""
        due = self.decided_s is not None or self._spares > 0
        return due and self.instance is None and self.record.exit_code is None

    @property
    def removes_next(self) -> bool:
        """Whether the job's turn would remove an attempt that has ended."""
        return self._to_remove is not None

    def ended_file(self) -> int:
        """A file descriptor that becomes readable when the attempt ends, or -1."""
        return self.instance.ended if self.instance is not None and not self._ended else -1

    def paused_s(self, now_s: float) -> float:
        """
        How long the job has been paused in all [s].

        :param now_s: since the run started [s]
        """
        since = 0.0 if self._paused_at_s is None else now_s - self._paused_at_s
        return self.record.paused_s + since

    # --- what is to be done ---

    def want(self, wanted: JobAllocation) -> None:
        """
        Have the job as wanted: what can be written directly is, and a gate is opened.

        :param wanted: not pending
        """
        self.wanted = wanted
        if wanted.state == JobState.RUNNING and self.decided_s is None:
            self.decided_s = self._context.now_s

    def cancel(self) -> None:
        """Have the job ended for good; what it has ended in by itself counts."""
        self._cancelled = True

    def note_end(self) -> None:
        """The attempt's first process has ended."""
        self._ended = True

    def forget_written(self) -> None:
        """Somebody else may have changed things: write all anew."""
        self._written = _Written()

    def write(self) -> None:
        """Write pause, weight, quota and vCPUs where they differ, then open the gate if due."""
        instance, wanted, now = self.instance, self.wanted, self._written
        if instance is None or instance.placement is None or self._ended:
            return
        if wanted.state == JobState.PENDING:
            return
        place = instance.placement
        paused = wanted.state == JobState.PAUSED and self.record.opened
        try:
            # Whoever is to stop does so first, and goes on once it has its place.
            if paused and not now.paused:
                self._pause(place, True)
            # Whoever comes to share vCPUs yields first, whoever is to compete moves first.
            weight = self._weight_now
            if weight != now.weight and weight == Weight.BACKGROUND:
                place.set_weight(weight)
                self._note_written(weight=weight)
            if wanted.cores != now.cores:
                place.set_cores(wanted.cores)
                self._note_written(cores=wanted.cores)
                if self.record.opened:
                    self._context.recorder.event("update_cores", self.job.name, wanted.cores)
            if weight != self._written.weight:
                place.set_weight(weight)
                self._note_written(weight=weight)
            if wanted.quota != now.quota:
                place.set_quota(wanted.quota)
                self._note_written(quota=wanted.quota)
            if not paused and now.paused is not False:
                self._pause(place, False)
            if self._written != now:
                self._complaint = ""
        except (OSError, ValueError) as error:
            self._complain(f"cannot be placed: {fault(error)}")
            return
        if self.decided_s is not None and not self._passed and self._let_through(instance):
            self._written = replace(self._written, weight=None)
            self.write()

    def unpin(self) -> None:
        """Undo that the program has pinned itself, so that it runs where the policy wants it."""
        place = None if self.instance is None or self._ended else self.instance.placement
        with contextlib.suppress(OSError):  # it may be gone
            if place is not None and self._passed and place.unpin() and not self._has_pinned:
                self._has_pinned = True
                self._context.note(self.job.name, "has pinned itself to some of its vCPUs; undone")

    @property
    def _weight_now(self) -> Weight:
        """Nobody passes a gate in the background: idle groups take turns of up to half a second."""
        passes = self._group is not None and not self._passed
        return Weight.NORMAL if passes else self.wanted.weight

    def _pause(self, place: Placement, paused: bool) -> None:
        """Stop the job or let it go on, and note it if it did not stand so."""
        place.set_paused(paused)
        self._written = replace(self._written, paused=paused)
        if paused == (self._paused_at_s is not None):
            return
        if paused:
            self._paused_at_s = self._context.now_s
        else:
            self._note_resumed(self._context.now_s)
        self.changes += 1
        self._context.recorder.event("pause" if paused else "unpause", self.job.name)

    def advance(self, now_s: float) -> None:
        """
        Pick up what was done meanwhile, and hand out what is to be done next.

        Making and removing wait for `take_turn`.

        :param now_s: since the run started [s]
        """
        call = self._call
        if call is not None:
            if not call.future.done():
                if now_s - call.since_s > LATE_S and not call.reported:
                    call.reported = True
                    self._context.note(self.job.name, f"{call.what} takes long")
                return
            self._call = None
            self._finish(call, now_s)
        # Whatever may be starting must be known before it can be ended.
        if self._cancelled and not (self.busy or self._ended or self._asked):
            self._end_cancelled(now_s)
        if now_s >= self._retry_at_s and self._call is None and self._ended and self.instance:
            self._submit("ending", self._outcome, now_s, self.instance)

    def take_turn(self, now_s: float) -> None:
        """
        Have an attempt made, or what is left of one removed; for a job that `needs_turn`.

        :param now_s: since the run started [s]
        """
        if self._to_remove is not None:
            self._submit("removing", self._context.runtime.remove, now_s, self._to_remove)
        else:
            self._begin_attempt(now_s)

    def adopt(self, instance: Instance, now_s: float) -> None:
        """
        Go on with what an earlier loop started, or have the rest of what has failed removed.

        :param instance: the last attempt
        :param now_s: since the run started [s]
        """
        self.instance = instance
        if self.record.failures == self.record.attempts:  # its end has been counted
            self._clear_attempt(now_s)
            return
        self._group = instance.attempt.group
        self._ended = instance.pid == 0
        if not self.record.opened:
            return  # it waits at its gate
        self.decided_s = now_s
        self.wanted = JobAllocation(JobState.RUNNING, threads=self.record.threads)
        place = instance.placement
        if place is None:
            return
        try:
            state = JobState.PAUSED if place.paused() else JobState.RUNNING
            self.wanted = JobAllocation(state, place.cores(), place.weight(), self.record.threads)
            self._paused_at_s = now_s if state == JobState.PAUSED else None
        except OSError:  # it has ended since it was found
            self._ended = True

    def attempt(self, number: int) -> Attempt:
        """
        One of the job's attempts.

        :param number: counts the attempts from 1
        """
        context = self._context
        folder = context.folder.attempt_folder(context.state.nonce, self.job.name, number)
        return Attempt(self.job, number, folder, self._group)

    def make_group(self) -> None:
        """
        Make the job's control group, where groups can be written.

        :raises OSError: if the machine does not allow it, or it cannot be written down first
        """
        if self._context.group_for is None or self._group is not None:
            return
        group = self._context.group_for(self.job.name)
        record = self.record
        before = record.group, record.weight_file, record.freezer_file
        files = str(group.path), str(group.weight_file), str(group.freezer_file)
        if before != files:
            record.group, record.weight_file, record.freezer_file = files
            self._context.save()  # what is made in part is removed, too
            if self._context.unsaved:
                record.group, record.weight_file, record.freezer_file = before
                raise OSError("the state cannot be written")
        group.create()
        self._group = group

    def close(self) -> None:
        """Give what was kept open back; the job itself goes on."""
        call = self._call
        if call is not None and call.what == "making" and call.has_result:
            (self.instance, _), self._call = call.future.result(), None
        instance = self.instance
        if instance is not None and instance.placement is not None:
            instance.placement.close()
        if instance is not None and instance.ended >= 0:
            os.close(instance.ended)
            self.instance = replace(instance, ended=-1)

    # --- the other threads' part ---

    def _begin_attempt(self, now_s: float) -> None:
        if self._away_since_s is None:
            self.record.attempts += 1
        self.record.opened = False
        try:
            self.make_group()
            attempt = self.attempt(self.record.attempts)
        except OSError as error:
            self._put_off("making", f"no place to run: {fault(error)}", now_s)
            return
        self._context.save()
        if self._context.unsaved:  # a loop that takes over must know of it
            self._put_off("making", "the state cannot be written", now_s)
            return
        late = self._asked and self._away_for_s(now_s) > UNAVAILABLE_LIMIT_S
        place = self._context.ahead if self.decided_s is None else self.wanted
        self._submit("making", self._make, now_s, attempt, place, late)

    def _end_cancelled(self, now_s: float) -> None:
        if self.record.exit_code is not None:
            return
        if self._group is not None:
            with contextlib.suppress(OSError):  # it may be gone
                self._group.release()
        self.record.exit_code, self.record.end_s = CANCELLED, now_s
        self._clear_attempt(now_s)
        self._context.recorder.event("end", self.job.name, detail="cancelled")
        self._context.save()

    def _outcome(self, instance: Instance) -> tuple[bool, int, str]:
        """In the attendant: whether what has ended had begun, and what `Runtime.outcome` says."""
        code, output = self._context.runtime.outcome(instance)
        return begun(instance.attempt.folder), code, output

    def _make(self, attempt: Attempt, place: JobAllocation, late: bool) -> tuple[Instance, bool]:
        """
        In the worker: make an attempt, unless a call that seemed to fail has done so.

        Returns whether it has begun, too: one that is found, of a loop before us, may have.
        """
        runtime = self._context.runtime
        found = runtime.find(attempt)
        if found is not None and (found.pid or exit_code(attempt.folder) is not None):
            return found, begun(attempt.folder)
        if found is not None:
            runtime.remove(found)
        if late:
            raise JobFailedError(f"not started within {UNAVAILABLE_LIMIT_S:g} s")
        self._asked = True
        gate.make(attempt.folder)
        return runtime.start(attempt, place.cores, place.weight), False

    def _let_through(self, instance: Instance) -> bool:
        """Open the gate, and look at later polls whether the job has begun; whether it has."""
        record, folder = self.record, instance.attempt.folder
        if not (record.opened or self._note_opening(instance)):
            return False
        try:
            self._passed = gate.let_through(folder, record.threads)
        except OSError as error:
            self._complain(f"its gate does not open: {fault(error)}")
        if self._passed and record.attempts == 1 and record.begun_s is None:
            self._note_begun(folder)
        return self._passed

    def _note_opening(self, instance: Instance) -> bool:
        """Write down that the gate is opened, before it is; whether that could be done."""
        record, now_s = self.record, self._context.now_s
        if now_s < self._retry_at_s:
            return False
        before = replace(record)
        record.opened, record.threads, record.key = True, self.wanted.threads, instance.key
        if record.start_s is None:
            record.decided_s, record.start_s = self.decided_s, now_s
        self._context.save()
        if self._context.unsaved:  # a loop that takes over must know of it
            vars(record).update(vars(before))
            self._put_off("opening", "the state cannot be written", now_s)
            return False
        self._pause_s, self._away_since_s = FIRST_PAUSE_S, None
        if self._group is not None and instance.placement is not None:
            # It counts all attempts together, and the making of them.
            with contextlib.suppress(OSError, ValueError):
                self._cpu_before_s = instance.placement.cpu_s()
        self._cpu_s = 0.0
        self.changes += 1
        self._context.recorder.event("start", self.job.name, self.wanted.cores, record.threads)
        return True

    def _note_begun(self, folder: Path) -> None:
        """The wrapper's mark is of the moment in which it went on; the clock may have been set."""
        record, now_s = self.record, self._context.now_s
        with contextlib.suppress(OSError):
            ago_s = time.time() - proof_file(folder).stat().st_mtime
            record.begun_s = min(max(record.start_s or 0.0, now_s - ago_s), now_s)

    def _submit(self, what: str, work: Callable[..., Any], now_s: float, *arguments: Any) -> None:
        self._call = self._context.submit(what, work, now_s, *arguments)

    def _finish(self, call: Call, now_s: float) -> None:
        try:
            result = call.future.result()
        except (RuntimeUnavailableError, OSError) as error:
            self._put_off(call.what, fault(error), now_s)
            return
        except JobFailedError as error:
            self._asked, self._away_since_s = False, None
            self._fail(GIVEN_UP, str(error), now_s)
            return
        except Exception as error:
            # Whatever Docker comes up with: tried again, and reported once.
            self._put_off(call.what, f"{type(error).__name__}: {fault(error)}", now_s)
            return
        self._pause_s, self._away_since_s, self._complaint = FIRST_PAUSE_S, None, ""
        if call.what == "making":
            self._note_made(now_s, *result)
        elif call.what == "ending":
            self._note_ended(now_s, *result)
        elif call.what == "removing":
            self._to_remove = None

    def _put_off(self, what: str, why: str, now_s: float) -> None:
        self._complain(f"{what} is tried again: {why}")
        self._retry_at_s = now_s + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, LONGEST_PAUSE_S)
        if self._away_since_s is None:
            self._away_since_s = now_s
        if self._asked or self._away_for_s(now_s) <= UNAVAILABLE_LIMIT_S:
            return
        self._away_since_s = None
        if what == "removing":
            self._to_remove = None
            self._context.note(self.job.name, "its remains could not be removed")
        elif what in ("making", "opening", "ending"):
            self._fail(GIVEN_UP, why, now_s)

    def _away_for_s(self, now_s: float) -> float:
        return 0.0 if self._away_since_s is None else now_s - self._away_since_s

    def _note_made(self, now_s: float, instance: Instance, has_begun: bool) -> None:
        self.instance, self._ended, self._asked = instance, instance.pid == 0, False
        if has_begun:
            self.record.opened, self.record.key = True, instance.key
            self.adopt(instance, now_s)
            self._context.save()

    def _note_resumed(self, now_s: float) -> None:
        if self._paused_at_s is not None:
            self.record.paused_s += now_s - self._paused_at_s
            self._paused_at_s = None

    def _note_ended(self, now_s: float, had_begun: bool, code: int, output: str) -> None:
        if not had_begun:
            self._note_lost(now_s, f"exit code {code}; last output: {output or 'none'}")
            return
        if code != 0:
            self._fail(code, f"exit code {code}; last output: {output or 'none'}", now_s)
            return
        self.record.exit_code, self.record.end_s = 0, now_s
        self._clear_attempt(now_s)
        self._context.recorder.event("end", self.job.name)
        if output:
            self._context.note(self.job.name, output)
        self._context.save()

    def _note_lost(self, now_s: float, why: str) -> None:
        """The attempt has ended at its gate; the job has not begun."""
        if self._spares == 0:
            self._fail(GIVEN_UP, why, now_s)
            return
        self._spares -= 1
        self._take_back(f"ended at its gate and is made anew: {why}", now_s)

    def _take_back(self, why: str, now_s: float) -> None:
        """An attempt that has not begun does not count."""
        record = self.record
        record.attempts -= 1
        if record.attempts == 0:
            record.decided_s = record.start_s = None
        self._context.note(self.job.name, " ".join(why.split()))
        self._clear_attempt(now_s)
        self._context.save()

    def _fail(self, code: int, why: str, now_s: float) -> None:
        """An attempt has failed: wait for the policy to start another one, or give up."""
        if self.decided_s is None:
            self._spares = 0
            self._take_back(f"cannot be made ahead: {why}", now_s)
            return
        record = self.record
        record.failures += 1
        name, text = self.job.name, " ".join(why.split())
        self.why = text
        if record.failures > RETRIES:
            record.exit_code, record.end_s = code, now_s
            detail = f"given up after {record.failures} attempts: {text}"
            self._context.recorder.event("end", name, detail=detail)
        else:
            self._context.note(name, failed_attempt(record.attempts, text))
        self._clear_attempt(now_s)
        self.wanted, self.decided_s = JobAllocation(), None
        self._context.save()

    def _clear_attempt(self, now_s: float) -> None:
        if self._paused_at_s is not None and self._group is not None:
            with contextlib.suppress(OSError):  # the next attempt begins in the same group
                self._group.set_frozen(False)
        self._note_resumed(now_s)
        self.close()
        over = self._ended and self.record.exit_code is not None
        self.kept_from_s = now_s if over and self._context.runtime.ends_whole else -math.inf
        self._to_remove = self.instance
        self.instance, self._passed, self._ended = None, False, False
        self.record.opened, self.record.key = False, ""
        self._written = _Written()

    def _note_written(self, **fields: Any) -> None:
        # A start is one change, and what a job weighs past its gate a part of it.
        known = "weight" not in fields or self._written.weight is not None
        self.changes += self.record.opened and known
        self._written = replace(self._written, **fields)

    def _complain(self, why: str) -> None:
        """Record a fault once, however often it is met."""
        text = " ".join(why.split())
        if text != self._complaint:
            self._complaint = text
            self._context.note(self.job.name, text)
