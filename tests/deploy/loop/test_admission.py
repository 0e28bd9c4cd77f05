"""A queue's folder that fails or hangs is said, and holds nobody up."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deploy.loop.admission import SILENT_S, Admission
from deploy.queue.spool import Scan, Spool
from deploy.records.recorder import Event, Recorder
from deploy.records.state import State
from env.scenario import load_scenario


class HangingDisk(Spool):
    """A queue on a disk that does not answer until it is let."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.answers = threading.Event()

    def scan(self, *asked: Any) -> Scan:
        assert self.answers.wait(30.0)
        raise OSError(5, "Input/output error")


def test_a_folder_that_does_not_answer_is_said_to_and_is_looked_at_again(tmp_path: Path) -> None:
    events: list[Event] = []
    scenario = load_scenario("cca-2025").with_jobs(())
    recorder = Recorder(tmp_path / "report", scenario, time.monotonic(), events.append)
    state = State("0" * 12, scenario.name, "process", "", 0.0)
    actuator: Any = SimpleNamespace(jobs={}, state=state)
    with HangingDisk(tmp_path / "queue") as spool:
        admission = Admission(spool, scenario, actuator, recorder)
        for now_s in (0.0, 1.0, 0.9 * SILENT_S):
            assert admission.poll(now_s) is None
        assert events == []
        for now_s in (SILENT_S + 1.0, SILENT_S + 2.0):
            assert admission.poll(now_s) is None
        assert [event.detail for event in events] == [
            "the queue's folder: does not answer; its jobs wait"
        ]
        spool.answers.set()
        give_up_s = time.monotonic() + 30.0
        while len(events) < 2:
            assert time.monotonic() < give_up_s
            admission.poll(SILENT_S + 3.0)
            time.sleep(0.001)
        assert events[1].detail == "the queue's folder: Input/output error; tried again"
        admission.close()
    recorder.close()
