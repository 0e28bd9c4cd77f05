"""Where the state of a deployment may be kept."""

import os
from pathlib import Path

import pytest

from deploy.linux.machine_lock import runtime_folder
from deploy.records.state import NEW_FILE, STATE_FILE, State, StateFolder, read_state
from env.errors import InputError


def test_a_state_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no link"):
        StateFolder(tmp_path / "state")


def test_the_state_is_not_kept_in_a_folder_that_somebody_else_may_have_made(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_folder() == Path("/tmp/coretide-1234")  # what is checked, and nothing above it
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert runtime_folder() == Path("/run/user/1234/coretide")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"service": null, "jobs": {"a": {"b\u2028": 1}}}']
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
