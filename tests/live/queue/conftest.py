"""A queue's folder as its user sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.records.proof import exit_code
from tests.live.conftest import PATIENCE, ROOT, Deployment


class Queue:
    """
    Hands jobs in, and waits for what becomes of them.

    Jobs that are processes leave a line in `ran` each time they begin and each time they end.
    """

    def __init__(self, folder: Path, image: str = ""):
        self.path = folder / "queue"
        self.ran = folder / "ran"
        self.image = image
        self.ran.touch()

    def describe(self, name: str, command: list[str]) -> str:
        job = {"name": name, "command": command, "threads": [1, 2], "memory_mib": 64}
        return yaml.safe_dump(job | ({"image": self.image} if self.image else {}))

    def drop(self, name: str, seconds: float, code: int = 0) -> None:
        """A job that takes some seconds and ends with a code."""
        self._drop(name, f"sleep {seconds}", code)

    def drop_held(self, name: str) -> None:
        """A job that goes on until it is let go."""
        self._drop(name, f"while [ ! -e {self.ran}-{name} ]; do sleep 0.05; done")

    def let_go(self, name: str) -> None:
        """Have all attempts of a held job end, those to come as soon as they have begun."""
        Path(f"{self.ran}-{name}").touch()

    def _drop(self, name: str, work: str, code: int = 0) -> None:
        note = "" if self.image else f">> {self.ran}"
        script = f"echo begin {name} {note}; {work}; echo end {name} {note}; exit {code}"
        self.drop_text(name, self.describe(name, ["sh", "-c", script]))

    def drop_text(self, name: str, text: str) -> None:
        self.path.mkdir(exist_ok=True)
        new = self.path / f".{name}"
        new.write_text(text)
        new.rename(self.path / f"{name}.yaml")

    def names(self, state: str) -> list[str]:
        return sorted(path.stem for path in (self.path / state).glob("*.yaml"))

    def outcome(self, state: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / state / f"{name}.json").read_text())
        return found

    def count(self, line: str) -> int:
        return self.ran.read_text().splitlines().count(line)

    def expect(self, state: str, *names: str, limit_s: float = 30.0) -> None:
        """Wait until jobs are in a state."""
        give_up_s = time.monotonic() + limit_s * PATIENCE
        while not set(names) <= set(self.names(state)):
            assert time.monotonic() < give_up_s, f"{state}: {self.names(state)}, not {names}"
            time.sleep(0.05)

    def expect_line(self, line: str, limit_s: float = 30.0) -> None:
        """Wait until a job has said something."""
        give_up_s = time.monotonic() + limit_s * PATIENCE
        while not self.count(line):
            assert time.monotonic() < give_up_s, f"no line {line!r}"
            time.sleep(0.02)

    def expect_proof(self, run: Deployment, name: str, limit_s: float = 30.0) -> None:
        """Wait until a job of a loop, which may be gone, has proved its end."""
        give_up_s = time.monotonic() + limit_s * PATIENCE
        while not any(exit_code(one) == 0 for one in run.state.glob(f"attempt-*-{name}-1")):
            assert time.monotonic() < give_up_s, f"no proof of {name}"
            time.sleep(0.02)

    def expect_attempt(self, run: Deployment, name: str, limit_s: float = 30.0) -> None:
        """Wait until a loop's state, as it would be resumed, speaks of an attempt of a job."""
        give_up_s = time.monotonic() + limit_s * PATIENCE
        state = run.state / "state.json"
        while not json.loads(state.read_text())["jobs"].get(name, {"attempts": 0})["attempts"]:
            assert time.monotonic() < give_up_s, f"no attempt of {name}"
            time.sleep(0.02)

    def ask(self, *options: str) -> subprocess.CompletedProcess[str]:
        """What `deploy.py` says to a user of the queue."""
        return subprocess.run(
            [sys.executable, "deploy.py", "--queue", str(self.path), *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path)
