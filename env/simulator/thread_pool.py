"""Threads that share a job's pieces, none of which waits for one that is not running."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Piece = TypeVar("Piece")


class ThreadPool:
    """
    The calling thread and its helpers; the work itself has to release Python's lock.

    Whoever is free takes the next piece. On a busy machine a helper may get its core too late: it
    then finds nothing left to do and nobody has waited for it.

    :param size: number of threads, the calling one included
    :param prepare: what each helper does first
    """

    def __init__(self, size: int, prepare: Callable[[], object] | None = None):
        self.size = size
        self._helpers = ThreadPoolExecutor(size - 1, initializer=prepare) if size > 1 else None

    def share(self, work: Callable[[Piece], object], pieces: Iterable[Piece]) -> None:
        """
        Do `work` on every piece.

        :param work: called once with each piece, on any thread and in any order
        :param pieces: of the job
        """
        left = iter(list(pieces))

        def take() -> None:
            for piece in left:
                work(piece)

        if self._helpers is None:
            take()
            return
        helpers = [self._helpers.submit(take) for _ in range(self.size - 1)]
        try:
            take()
        finally:
            for helper in helpers:
                if not helper.cancel():
                    helper.result()
