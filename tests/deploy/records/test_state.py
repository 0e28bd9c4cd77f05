"""Where the state of a deployment may be kept."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deploy.linux.machine_lock import runtime_folder
from deploy.linux.service_process import Program
from deploy.records.state import (
    LOCK_FILE,
    NEW_FILE,
    STATE_FILE,
    JobRecord,
    ServiceRecord,
    State,
    StateFolder,
    as_json,
    read_state,
)
from env.errors import InputError


def test_a_state_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no link"):
        StateFolder(tmp_path / "state")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize(
    ("owner", "group", "rights"), [(12345, 0, 0o755), (0, 12345, 0o775), (0, 0, 0o777)]
)
def test_a_state_folder_that_others_could_replace_is_refused(tmp_path, owner, group, rights):
    above = tmp_path / "above"
    above.mkdir()
    os.chown(above, owner, group)
    above.chmod(rights)
    with pytest.raises(InputError, match=f"others could put another in its place: {above}$"):
        StateFolder(above / "below" / "state")
    os.chown(above, 0, 0)
    for rights in (0o1777, 0o775):  # as /tmp, where what is ours is not theirs to move; umask 002
        above.chmod(rights)
        StateFolder(above / "below" / "state")


def test_a_state_that_cannot_be_locked_or_forgotten_is_said_to_be(tmp_path, monkeypatch):
    folder = StateFolder(tmp_path / "state")
    (folder.path / LOCK_FILE).mkdir()
    with pytest.raises(InputError, match="state: cannot be locked: "):
        folder.lock()
    (folder.path / STATE_FILE).mkdir()  # as a disk that can be read alone, it is not removed
    assert folder.clear().startswith("all is undone, but the state cannot be removed: ")


def test_the_state_is_not_kept_in_a_folder_that_somebody_else_may_have_made(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_folder() == Path("/tmp/coretide-1234")  # what is checked, and nothing above it
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert runtime_folder() == Path("/run/user/1234/coretide")


WRITTEN = State("0" * 12, "two", "process", "", 1.0)
WRITTEN.service = [ServiceRecord(7, 5, {7: (0, 1)}, Program((0, 0, 0, 0), "/usr/bin/memcached"))]
WRITTEN.jobs = {"dedup": JobRecord(attempts=1, opened=True, decided_s=0.5)}


def damaged(path: str, value: Any) -> str:
    """A state in which one value is another one."""
    content = place = as_json(WRITTEN)
    *above, last = path.split(".")
    for name in above:
        place = place[int(name) if name.isdecimal() else name]
    place[last] = value
    return json.dumps(content)


def test_a_state_reads_back_as_it_was_written(tmp_path):
    folder = StateFolder(tmp_path / "state")
    folder.begin(WRITTEN)
    assert folder.load() == WRITTEN


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", "{}", '{"service": null, "jobs": {"a": {"b\u2028": 1}}}', "[" * 100_000),
        damaged("service.0.program.users", [1e999]),
        damaged("service.0.affinity", {"x": [0]}),
        damaged("service.0.pid", "7"),
        damaged("jobs.dedup.attempts", None),
        damaged("jobs.dedup.group", 5),
        damaged("started_s", "1"),
        damaged("nonce", ["0"]),
        damaged("later", 1),
    ],
)
def test_a_state_that_is_none_is_refused_in_one_line(tmp_path, content):
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(InputError) as refused:
        read_state(tmp_path)
    said = f"{tmp_path}/{STATE_FILE}: damaged (no state that a loop writes)"
    assert str(refused.value).splitlines() == [said]


def test_what_a_loop_that_was_killed_as_it_wrote_has_left_is_cleared_too(tmp_path):
    folder = StateFolder(tmp_path / "state")
    folder.begin(State("0" * 12, "two", "process", "", 0.0))
    (folder.path / NEW_FILE).write_text("{")
    folder.attempt_folder("0" * 12, "dedup", 1)
    folder.clear()
    assert list(folder.path.iterdir()) == []
