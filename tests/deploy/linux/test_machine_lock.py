"""One loop a machine, whatever its state folder and whoever else is about."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deploy.linux import machine_lock
from deploy.linux.helpers import INSTALLATION
from deploy.records.state import claim
from env.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lock is: not the machine's own."""
    monkeypatch.setattr(machine_lock, "runtime_folder", lambda: tmp_path / "run")
    return tmp_path / "run"


def test_a_second_loop_is_refused_while_the_first_has_the_machine() -> None:
    with claim():
        assert machine_lock.is_taken()
        with pytest.raises(InputError, match="another loop steers this machine already"):
            claim()
    assert not machine_lock.is_taken()
    claim().close()


def test_a_guardian_that_looks_for_a_moment_refuses_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_lock, "WAIT_S", 20.0)
    held = claim()
    freed = threading.Timer(0.05, held.close)
    freed.start()
    claim().close()
    freed.join()


def test_a_loop_that_is_killed_has_the_machine_no_more(folder: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from deploy.linux import machine_lock\n"
        "machine_lock.runtime_folder = lambda: Path(sys.argv[1])\n"
        "lock = machine_lock.MachineLock(); print('taken', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=INSTALLATION) as loop:
        assert loop.stdout is not None and loop.stdout.readline() == b"taken\n"
        assert machine_lock.is_taken()
        loop.kill()
    claim().close()


def test_a_lock_that_others_could_hold_is_none(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(InputError, match=r"cannot hold the machine.s lock: must be a folder of"):
        claim()
