"""Processes that share out work end with the command that started them."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from threadpoolctl import threadpool_info

from training.processes import process_pool, side_by_side

ROOT = Path(__file__).resolve().parents[2]

SHARED = """
import time
from training.processes import process_pool
with process_pool(2) as pool:
    busy = pool.submit(time.sleep, 600)
    print("begun", flush=True)
    busy.result()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_pool_ends_with_the_process_that_started_it(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SHARED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        workers = psutil.Process(process.pid).children()
        process.send_signal(number)
        process.wait(30.0)
    assert len(workers) == 2
    assert psutil.wait_procs(workers, 30.0)[1] == []


def test_a_pool_that_an_exception_ends_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), process_pool(2) as pool:
        pool.submit(time.sleep, 60.0)
        raise KeyboardInterrupt
    assert threading.active_count() == before
    assert multiprocessing.active_children() == []


def _threads(_: int) -> int:
    """How many threads the linear algebra of this process has at most."""
    return max(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")


def test_what_is_done_side_by_side_comes_in_order_and_fights_for_no_vcpu() -> None:
    assert side_by_side(abs, range(-3, 3)) == [3, 2, 1, 0, 1, 2]
    assert side_by_side(abs, []) == []
    assert side_by_side(_threads, range(2)) == [1, 1]
