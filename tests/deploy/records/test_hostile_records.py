"""A report folder of somebody else's: no record in it is waited for, or read without end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.records import live_view, predicted, recorder, run_report
from deploy.records.recorder import EVENTS_FILE, LOAD_FILE, POLICY_FILE, SAMPLES_FILE
from env.errors import InputError
from env.inputs.text_files import MOST_RECORD_BYTES

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "log": (EVENTS_FILE, recorder.read_events),
    "start": (EVENTS_FILE, recorder.started_at_s),
    "samples": (SAMPLES_FILE, recorder.read_samples),
    "load": (LOAD_FILE, run_report.load_intervals),
    "report": (run_report.REPORT_FILE, run_report.read_report),
    "policy": (POLICY_FILE, predicted.read_policy),
    "view": (SAMPLES_FILE, lambda folder: live_view.Tail(folder / SAMPLES_FILE).lines()),
}


def put(path: Path, kind: str) -> None:
    """Something that is no record."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    put(tmp_path / name, kind)
    with pytest.raises(InputError, match=name) as refused:
        read(tmp_path)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("reader", ["log", "samples"])
def test_what_is_too_large_is_refused_before_it_is_read(tmp_path: Path, reader: str) -> None:
    name, read = READERS[reader]
    with (tmp_path / name).open("wb") as file:
        file.truncate(MOST_RECORD_BYTES + 1)
    with pytest.raises(InputError, match=f"{name}: .*larger than 128 MiB"):
        read(tmp_path)
