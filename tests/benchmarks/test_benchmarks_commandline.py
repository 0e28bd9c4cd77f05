"""The benchmarks' command lines: what is wrong is said in one line, before the work begins."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.linux.signals import STOPPING
from deploy.tap.tracer import why_not

ROOT = Path(__file__).resolve().parents[2]

ALL = (
    *("ablations", "baselines", "job_models", "live", "local"),
    *("neighbour", "ppo_part", "priority", "sharing", "speed", "starts", "tap"),
)
COUNTS = {
    "ablations": ("--steps", "--seeds"),
    "baselines": ("--episodes",),
    "local": ("--turns",),
    "ppo_part": ("--family",),
    "priority": ("--turns", "--qps"),
    "sharing": ("--turns",),
    "speed": ("--repetitions", "--rollouts", "--threads", "--seeds", "--steps"),
    "starts": ("--qps", "--turns"),
}


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A command may take over the signals of its process, which is the tests' here."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def said(name: str, options: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main(options)
    assert end.value.code == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


@pytest.mark.parametrize("name", ALL)
def test_every_option_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(name, ["--help"], 0, capsys)
    assert f"usage: python -m benchmarks.{name} " in shown
    options = shown.split("options:")[1].split("\n  -")[1:]
    assert all(len(option.split("  ", 1)) == 2 for option in options)


@pytest.mark.parametrize("value", ["0", "-1", "x"])
@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, all_ in COUNTS.items() for option in all_]
)
def test_counts_are_whole_numbers(
    name: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(name, [option, value], 2, capsys)
    assert f"{option}: must be a whole number of at least 1" in shown and shown.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "nan", "x"])
def test_a_load_that_is_none_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said("sharing", ["--load", value], 2, capsys)
    assert "--load: must be a number of at least 0.01" in shown and shown.count("\n") == 1


@pytest.mark.parametrize("name", sorted({*ALL} - {"job_models", "neighbour", "ppo_part", "starts"}))
def test_a_file_that_cannot_be_written_is_told_first(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(name, ["--json", "/proc/no/such.json"], 2, capsys)
    assert "/proc/no/such.json: cannot be written" in shown and shown.count("\n") == 1


@pytest.mark.parametrize("name", ["baselines", "speed"])
def test_ctrl_c_ends_it_with_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(f"benchmarks.{name}")
    others = set(psutil.Process().children())
    # A shell starts what runs in its background without Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        shown = said(name, [], 130, capsys)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert shown == "coretide: stopped\n"
    started = set(psutil.Process().children()) - others
    assert psutil.wait_procs(started, 10.0)[1] == []


@pytest.mark.skipif(not shutil.which("memcached"), reason="no memcached")
@pytest.mark.parametrize(
    ("number", "command", "said"),
    [
        (signal.SIGINT, ["live", "--quick"], "; nothing is left running"),
        (signal.SIGTERM, ["live", "--quick"], "; nothing is left running"),
        pytest.param(
            *(signal.SIGTERM, ["tap"], ""),
            marks=pytest.mark.skipif(bool(why_not()), reason="no latency tap here"),
        ),
    ],
)
def test_a_benchmark_on_the_machine_is_stopped_with_what_it_started(
    number: signal.Signals, command: list[str], said: str
) -> None:
    name, *options = command
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=ROOT,
        env={**os.environ, "PATH": "/usr/bin:/bin"},  # no Docker daemon, which would take seconds
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    give_up_s = time.monotonic() + 60.0
    while not (children := psutil.Process(process.pid).children(recursive=True)):
        assert process.poll() is None and time.monotonic() < give_up_s
        time.sleep(0.02)
    process.send_signal(number)
    _, shown = process.communicate(timeout=60.0)
    assert (process.returncode, shown) == (130, f"coretide: stopped{said}\n")
    # The kernel ends bpftrace with its starter, and takes its probes away first.
    assert psutil.wait_procs(children, 30.0)[1] == []
