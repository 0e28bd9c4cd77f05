"""Work for several processes, none of which outlives the command that started it."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from threadpoolctl import threadpool_limits

PR_SET_PDEATHSIG = 1
"""From Linux' prctl.h."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """
    Do independent pieces of work in several processes, one a vCPU; what they give, in their order.

    :param work: a function that pickle knows; each piece is done by one call
    :param items: what to call it with
    """
    if not items:
        return []
    with process_pool(min(len(os.sched_getaffinity(0)), len(items))) as pool:
        return list(pool.map(work, items))


@contextlib.contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """
    A pool of processes that end with the block, at once where an exception ends it.

    Each has one thread for its linear algebra: where every process takes a thread a vCPU, they
    fight for the vCPUs, and a fit takes longer than in one process.

    They end, too, when the process that started them is killed, whatever they are at.
    A terminal sends Ctrl-C to all of them. Only the process that started them answers it; they
    inherit that it is blocked, and it waits until all of them are there.

    :param workers: processes
    """
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, _begin, (os.getpid(),)) as pool:
        try:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            pool.submit(int)  # it starts with the first piece of work
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            # A pool that is not waited for here closes its pipe while Python ends and writes to it.
            pool.shutdown(cancel_futures=True)
            raise


def _begin(starter: int) -> None:
    """
    Give this process one thread for linear algebra, and have the kernel end it with its starter.

    :param starter: the process that started it, which has no say in that
    """
    threadpool_limits(1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:  # it was too late for that
        os._exit(1)
