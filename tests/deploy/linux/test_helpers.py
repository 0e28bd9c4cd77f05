"""A helper process runs our own modules, whatever somebody has put into the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy import deployment
from deploy.jobs.yielding import spinner_command
from deploy.linux.helpers import INSTALLATION, helper_command
from deploy.load.dynamic_load import Client
from deploy.load.probe import Probe
from deploy.records import run_report
from deploy.safety import guardian
from env.errors import InputError
from env.simulator.load import LoadTrace

STARTED = (
    "deploy/load/__main__",
    "deploy/load/generator",
    "deploy/load/probe",
    "deploy/records/live_view",
    "deploy/records/run_report",
    "deploy/report",
    "deploy/safety/guardian",
    "deploy/view",
    "training/characterise",
    "training/evaluation/live_pictures",
    "training/refinement/predict_run",
)
IMPORTED = ("env/__init__", "numpy", "runpy", "sitecustomize", "usercustomize")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has modules of our names; each says in a file if it is run."""
    folder, ran = tmp_path / "hostile", tmp_path / "ran"
    for module in (*STARTED, *IMPORTED):
        path = folder / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(ran)!r}, 'a').write({module!r})")
        for package in path.relative_to(folder).parents:
            if package != Path():
                (folder / package / "__init__.py").touch()
    monkeypatch.chdir(folder)
    return ran


@pytest.mark.parametrize("module", STARTED)
def test_a_planted_module_is_not_run(ran: Path, module: str) -> None:
    name = module.removesuffix("/__main__").replace("/", ".")
    result = subprocess.run(
        helper_command(name, *(["--help"] if "guardian" not in name else [])),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert not ran.exists(), ran.read_text()


def test_neither_is_a_module_that_the_environment_names(
    ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ".")
    command = helper_command("deploy.load.probe", "--help")
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert not ran.exists(), ran.read_text()


def test_a_helper_runs_in_the_root_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "where.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1:])")
    monkeypatch.syspath_prepend(tmp_path)  # a helper finds what its parent finds
    command = helper_command("where", "a b", "-m")
    assert subprocess.check_output(command, text=True) == "/ ['a b', '-m']\n"


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_nobody_else_may_write_to_what_a_root_program_makes(tmp_path: Path, umask: int) -> None:
    made = tmp_path / "above" / "queue"
    asked = [*("--queue", str(made)), *("--submit", str(tmp_path / "nothing.yaml"))]
    (tmp_path / "nothing.yaml").write_text("{name: one, command: [a], threads: [1], memory_mib: 1}")
    subprocess.run([sys.executable, INSTALLATION / "deploy.py", *asked], umask=umask, check=True)
    command = helper_command("os")
    command[3] += f"\nos.mkdir({str(tmp_path / 'helped')!r})"
    subprocess.run(command, umask=umask, check=True)
    for folder in (made.parent, made, tmp_path / "helped"):
        assert folder.stat().st_mode & (0o022 | umask) == 0, folder


def test_a_relative_entry_of_the_path_is_left_out(
    ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", ["", ".", "deploy", str(INSTALLATION)])
    assert subprocess.call(helper_command("os")) == 0
    assert not ran.exists(), ran.read_text()


def test_whatever_starts_a_helper_starts_our_own(
    ran: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    probe = Probe("127.0.0.1", 9, 0)
    give_up_s = time.monotonic() + 20.0
    while not probe.known_until_s and time.monotonic() < give_up_s:
        assert probe.poll(), "the probe has ended"
        time.sleep(0.01)
    probe.stop()
    with pytest.raises(InputError, match="the load generator has ended"):
        Client("127.0.0.1", 9, LoadTrace.explicit([5000], 1.0), 0)
    watcher = guardian.launch()
    watcher.stop()
    view = deployment._start_view(tmp_path / "no run")
    assert view.wait(20.0) == 2
    assert not run_report._draw(tmp_path / "no run")
    said = capfd.readouterr().err
    assert "no run" in said and "no pictures" in said
    assert not ran.exists(), ran.read_text()


def test_nor_does_a_deployment_look_there(ran: Path) -> None:
    command = [sys.executable, str(INSTALLATION / "deploy.py"), "--help"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert not ran.exists(), ran.read_text()


def test_a_planted_module_is_not_run_by_the_spinners_of_a_check(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for module in ("select", "os", "sitecustomize"):
        (tmp_path / f"{module}.py").write_text(f"open({str(ran)!r}, 'a').write('{module}')")
    spinner = subprocess.Popen(spinner_command(), stdin=subprocess.PIPE, cwd=tmp_path)
    spinner.communicate(b"..", timeout=10)
    assert spinner.returncode == 0
    assert not ran.exists()


def test_a_guardian_that_had_nothing_to_watch_is_gone_when_closed() -> None:
    watcher = guardian.launch()
    watcher.close()
    with pytest.raises(ProcessLookupError):
        os.kill(watcher.pid, 0)
