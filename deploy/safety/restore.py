"""Undoing a deployment: the machine is left as it was found, and that is read back."""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import PurePosixPath

from deploy.jobs import precedence
from deploy.jobs.runtimes import Runtime, RuntimeUnavailableError
from deploy.linux import service_process
from deploy.linux.cgroups import Hierarchy, JobGroup, put_back
from deploy.linux.service_process import is_alive
from deploy.records.state import JobRecord, ServiceRecord, State, StateFolder
from env.errors import fault

ATTEMPTS, PAUSE_S = 5, 0.5


def undo(
    state: State,
    folder: StateFolder,
    runtime: Runtime,
    hierarchy: Hierarchy | None,
    before_last: Callable[[list[str]], None] = lambda faults: None,
) -> list[str]:
    """
    Give memcached its vCPUs back, end what still runs, remove what was made.

    Last of all memcached goes before other programs no longer: what takes CPU time comes earlier.

    :param state: what the loop did
    :param folder: the state folder, with the proofs of its jobs
    :param runtime: runs the jobs
    :param hierarchy: how control groups are mounted, if they are
    :param before_last: called once, before memcached's precedence goes, with what could not be
        undone until then; may add to it
    :return: what could not be undone, one line each; nothing if all is as it was
    """
    groups = _groups(state.jobs.values(), hierarchy)
    if hierarchy is None and any(record.group for record in state.jobs.values()):
        nothing = ["nothing is undone: control groups cannot be reached by this user"]
        before_last(nothing)
        return nothing
    steps: list[Callable[[], str]] = [
        *(partial(_restore_service, record) for record in state.service),
        lambda: _leave_pods(state),
        lambda: _end_jobs(state, folder, runtime, groups),
        lambda: _remove_groups(groups),
    ]
    faults: list[str] = []
    try:
        faults += filter(None, [step() for step in steps])
        before_last(faults)
    finally:  # Docker's removals take seconds, and memcached goes before them
        faults += filter(None, map(_restore_precedence, state.service))
    return faults


def forget(
    names: Sequence[str], state: State, folder: StateFolder, hierarchy: Hierarchy | None
) -> str:
    """
    Remove what a killed loop has left of jobs that are over, so that their names are free again.

    :param names: the jobs'; nothing of them runs
    :param state: what the loop did; forgets them
    :param folder: the state folder, with the proofs of its jobs
    :param hierarchy: how control groups are mounted, if they are
    :return: what could not be removed, in one line; empty if all was
    """
    if trouble := _remove_groups(_groups([state.jobs[name] for name in names], hierarchy)):
        return trouble
    for name in names:
        folder.forget_job(state.nonce, name)
        del state.jobs[name]
    return ""


def in_words(state: State) -> str:
    """
    What a deployment has left once all of it was undone.

    :param state: what the loop did
    """
    gone = [str(record.pid) for record in state.service if not is_alive(record.who)]
    if not gone:
        return "the machine is as it was found"
    return f"memcached {', '.join(gone)} is gone; all else is as it was found"


def is_gone(state: State) -> bool:
    """
    Whether a memcached that was moved, and has no successor, has ended.

    :param state: what the loop did
    """
    return not all(is_alive(record.who) for record in state.service)


def _groups(records: Iterable[JobRecord], hierarchy: Hierarchy | None) -> list[JobGroup]:
    return [
        JobGroup(hierarchy, PurePosixPath(record.group), 0)
        for record in records
        if record.group and hierarchy is not None
    ]


def _restore_service(record: ServiceRecord) -> str:
    who = record.who
    try:
        service_process.restore(who, record.affinity)
        now = service_process.affinities(who.pid) if is_alive(who) else {}
    except OSError as error:
        return f"memcached {who.pid} does not have its vCPUs back: {fault(error)}"
    for thread, cores in now.items():
        wanted = record.affinity.get(thread, record.affinity.get(record.pid, cores))
        if cores != wanted:
            return f"memcached's thread {thread} has {cores}, not {wanted}"
    return ""


def _restore_precedence(record: ServiceRecord) -> str:
    return "" if record.weighing is None else precedence.put_back(record.who, record.weighing)


def _leave_pods(state: State) -> str:
    """Jobs that were there before us are not ended: their control groups are put back."""
    return "; ".join(one for record in state.jobs.values() for one in put_back(record.had))


def _end_jobs(state: State, folder: StateFolder, runtime: Runtime, groups: list[JobGroup]) -> str:
    # An attempt that died at its gate does not count, and may have left a container.
    if not (folder.attempt_folders() or any(record.attempts for record in state.jobs.values())):
        return ""
    for group in groups:
        with contextlib.suppress(OSError):  # it may be gone
            group.release()
    trouble = ""
    for _ in range(ATTEMPTS):
        try:
            runtime.sweep(folder.attempt_folders(), groups)
            return ""
        except (RuntimeUnavailableError, OSError) as error:
            trouble = f"jobs may be left: {fault(error)}"
            time.sleep(PAUSE_S)
    return trouble


def _remove_groups(groups: list[JobGroup]) -> str:
    give_up_s = time.monotonic() + ATTEMPTS * PAUSE_S
    while True:
        for group in groups:
            group.remove()
        left = [group for group in groups if group.exists()]
        if not left:
            return ""
        if time.monotonic() > give_up_s:
            return f"control groups are left: {', '.join(str(group.path) for group in left)}"
        time.sleep(0.02)  # a dying process still counts as a member for a moment
