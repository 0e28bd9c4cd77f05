"""
Runs that differ in their seed alone, shared out to processes here or to the machines of a cluster.

A run's output goes to `train.log` in its folder, and one that fails does not end the others. Ctrl-C
ends all of them as they stand. A cluster's machines need this version installed, and files that the
command names under the same paths; what a run writes there comes back when it is over.
"""

import argparse
import contextlib
import io
import logging
import os
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from env.errors import InputError
from env.inputs.commandline import address
from training.processes import process_pool

Train = Callable[[argparse.Namespace], str]

ON_RAY = 0
"""Instead of a number of processes: the Ray cluster that this machine is part of."""

ANSWERS_S = 5.0
"""How long a cluster may take to answer [s]."""

LOG = "train.log"
"""Where a run says what it would say on a terminal."""


def train_side_by_side(
    train: Train, runs: Sequence[argparse.Namespace], workers: int
) -> Iterator[str]:
    """
    Train with several seeds; yields what each run has come to, the first to be done first.

    :param train: one run, whose `out` is its folder
    :param runs: their arguments
    :param workers: number of processes, or `ON_RAY`
    :raises InputError: if this machine is part of no cluster
    :raises Exception: what the first run that failed has raised, once all others are over
    """
    failures: list[Exception] = []
    for said in _on_ray(train, runs) if workers == ON_RAY else _here(train, runs, workers):
        if isinstance(said, Exception):
            failures.append(said)
        else:
            yield said
    if failures:
        raise failures[0]


def _here(
    train: Train, runs: Sequence[argparse.Namespace], workers: int
) -> Iterator[str | Exception]:
    """In processes of this machine; what a run says, or why it failed."""
    processes = min(workers, len(runs))
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    with process_pool(processes) as pool:
        for done in as_completed([pool.submit(_with_log, train, run, threads) for run in runs]):
            error = done.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield error or done.result()


def _on_ray(train: Train, runs: Sequence[argparse.Namespace]) -> Iterator[str | Exception]:
    """The same on the machines of a Ray cluster, a vCPU a run."""
    try:
        import ray
    except ImportError as error:
        raise InputError("--workers ray: needs Ray; pip install coretide[ray]") from error
    try:
        _require_answer(os.environ.get("RAY_ADDRESS", ""))
        ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        raise InputError(
            "--workers ray: no cluster answers; begin one with ray start --head, or join one with "
            "ray start --address=HOST:PORT"
        ) from error
    try:
        away = ray.remote(num_cpus=1)(_with_archive)
        folders = {away.remote(train, run): run.out for run in runs}
        while folders:
            (done,), _ = ray.wait(list(folders))
            folder = folders.pop(done)
            try:
                said, archive = ray.get(done)
            except ray.exceptions.RayError as error:  # its machine is gone
                said, archive = InputError(f"{folder}: {type(error).__name__}"), b""
            if archive:
                _unpack(archive, folder)
            yield said
    finally:
        ray.shutdown()


def _require_answer(known: str) -> None:
    """Make sure that somebody listens where a cluster is said to be: Ray would wait for minutes."""
    with contextlib.suppress(argparse.ArgumentTypeError):  # one of Ray's other ways to say it
        socket.create_connection(address(known), ANSWERS_S).close()


def _with_log(train: Train, run: argparse.Namespace, threads: int = 1) -> str:
    """A run that says nothing on the terminal; torch has so many threads, if nobody says else."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    run.out.mkdir(parents=True, exist_ok=True)
    with (
        (run.out / LOG).open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        return train(run)


def _with_archive(train: Train, run: argparse.Namespace) -> tuple[str | Exception, bytes]:
    """A run in a folder of this machine: what it says or why it failed, and all that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        own: dict[str, Any] = vars(run) | {"out": Path(folder)}
        said: str | Exception
        try:
            said = _with_log(train, argparse.Namespace(**own)).replace(folder, str(run.out))
        except Exception as error:
            said = error
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(folder, ".")
        return said, packed.getvalue()


def _unpack(archive: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
        packed.extractall(folder, filter="data")
