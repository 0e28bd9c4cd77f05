"""Work for several processes, none of which outlives the command that started it."""

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor


@contextlib.contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """
    A pool of processes that end with the block, at once where an exception ends it.

    A terminal sends Ctrl-C to all of them. Only the process that started them answers it; they
    inherit that it is blocked, and it waits until all of them are there.

    :param workers: processes
    """
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            pool.submit(int)  # it starts with the first piece of work
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
