from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.commands import parser
from deploy.safety.watchdog import Watchdog

UNITS = Path(__file__).parents[3] / "deploy"


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What systemd listens on, with a WatchdogSec of 1 s."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(1.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        yield listener


def test_systemd_hears_that_the_loop_is_ready_and_lives(systemd: socket.socket) -> None:
    watchdog = Watchdog()
    assert systemd.recv(100) == b"READY=1"
    for now_s in (0.0, 0.1, 0.4, 0.5, 0.9, 1.1):
        watchdog.beat(now_s)
    systemd.settimeout(0.1)
    heard = [systemd.recv(100) for _ in range(3)]
    assert heard == [b"WATCHDOG=1"] * 3
    with pytest.raises(TimeoutError):
        systemd.recv(100)


def test_programs_we_start_do_not_answer_for_us(systemd: socket.socket) -> None:
    Watchdog()
    said = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert "NOTIFY_SOCKET" not in said and "WATCHDOG_USEC" not in said


def test_a_systemd_that_has_gone_holds_nobody_up(systemd: socket.socket) -> None:
    watchdog = Watchdog()
    systemd.close()
    watchdog.beat(1.0)


def test_without_systemd_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Watchdog().beat(1.0)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
@pytest.mark.parametrize(
    "unit",
    ["coretide.service", "coretide-queue.service", "coretide-node.service", "coretide.slice"],
)
def test_systemd_understands_the_units(unit: str, tmp_path: Path) -> None:
    text = (UNITS / unit).read_text()
    # The programs are where a user puts them.
    text = text.replace("/opt/coretide/.venv/bin/python", "/bin/true").replace(
        "WorkingDirectory=/opt/coretide", "WorkingDirectory=/"
    )
    (tmp_path / unit).write_text(text)
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / unit)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and unit not in result.stderr, result.stderr


@pytest.mark.parametrize("more", ["--probe", "--resume", "--check", "--dry-run"])
def test_the_service_restores_what_its_options_say_it_has_deployed(more: str) -> None:
    lines = (UNITS / "coretide.service").read_text().splitlines()
    (stop,) = (line for line in lines if line.startswith("ExecStopPost="))
    command = stop.replace("$CORETIDE_OPTIONS", f"--state /run/other --docker unix:///d {more}")
    arguments = parser().parse_args(command.split("deploy.py ")[1].split())
    assert arguments.restore
    assert (arguments.state, arguments.docker) == (Path("/run/other"), "unix:///d")
