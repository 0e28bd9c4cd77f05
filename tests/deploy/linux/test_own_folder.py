"""What others may put into the way of a root program's records leads nothing elsewhere."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from deploy.linux.own_folder import OwnFolder
from deploy.records.lines import Disk, LineFile
from deploy.records.recorder import EVENTS_FILE, SCENARIO_FILE, Recorder, set_aside
from deploy.records.run_report import PICTURE_FILE, REPORT_FILE, illustrate
from env.errors import InputError
from env.scenario import Scenario, load_scenario

LINE = "2026-11-22T10:00:00.000000 start scheduler\n"
SET_ASIDE = "2026-11-22T10-00-00"


@pytest.fixture
def scenario() -> Scenario:
    return load_scenario("cca-2025")


def test_a_link_in_a_records_place_overwrites_nothing(tmp_path: Path, scenario: Scenario) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    for name in (SCENARIO_FILE, EVENTS_FILE):
        folder = tmp_path / f"report-{name}"
        folder.mkdir()
        (folder / name).symlink_to(secret)
        with pytest.raises(InputError, match=f"{name} must be a plain file of yours, no link"):
            Recorder(folder, scenario, 0.0)
    assert secret.read_text() == "mine"


def test_a_pipe_in_a_files_place_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "load.txt")
    with pytest.raises(OSError, match=r"load\.txt must be a plain file of yours"):
        LineFile.at(tmp_path / "load.txt", Disk("here"))


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, scenario: Scenario) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    for rights in (0o777, 0o757):
        folder.chmod(rights)
        with pytest.raises(InputError, match="report: cannot be written to: must be a folder of y"):
            Recorder(folder, scenario, 0.0)
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_group_may_write_to_it_only_if_it_is_the_users_own(
    tmp_path: Path, scenario: Scenario
) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    folder.chmod(0o775)
    for group in ("daemon", "users", 12345):
        shutil.chown(folder, group=group)
        with pytest.raises(InputError, match="must be a folder of yours"):
            Recorder(folder, scenario, 0.0)
    shutil.chown(folder, group="root")
    Recorder(folder, scenario, 0.0).close()
    folder.chmod(0o777)
    with pytest.raises(InputError, match="must be a folder of yours"):
        Recorder(folder, scenario, 0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_so_is_one_that_somebody_else_owns(tmp_path: Path, scenario: Scenario) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / EVENTS_FILE).write_text(LINE)
    os.chown(folder, 12345, 12345)
    with pytest.raises(InputError, match="must be a folder of yours"):
        Recorder(folder, scenario, 0.0)
    with pytest.raises(InputError, match="must be a folder of yours"):
        set_aside(folder)
    assert {path.name for path in folder.iterdir()} == {EVENTS_FILE}


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, scenario: Scenario) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "report").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no link"):
        Recorder(tmp_path / "report", scenario, 0.0)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_an_earlier_run_has_left_is_not_moved_through_a_link(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "report"
    elsewhere.mkdir()
    folder.mkdir()
    (folder / EVENTS_FILE).write_text(LINE)
    (folder / SET_ASIDE).symlink_to(elsewhere)
    with pytest.raises(InputError, match="no link"):
        set_aside(folder)
    assert list(elsewhere.iterdir()) == []
    assert (folder / EVENTS_FILE).read_text() == LINE


def test_only_plain_files_of_ours_are_set_aside(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text(LINE)
    (tmp_path / "load.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "report.json").mkdir()
    set_aside(tmp_path)
    assert [path.name for path in (tmp_path / SET_ASIDE).iterdir()] == [EVENTS_FILE]
    assert (tmp_path / "load.txt").is_symlink() and (tmp_path / "report.json").is_dir()


@pytest.mark.parametrize("first", [b"\xff" * 100, b"0001-01-01T00:00:00+20:00 start"])
def test_a_log_whose_first_line_is_no_moment_is_set_aside(tmp_path: Path, first: bytes) -> None:
    (tmp_path / EVENTS_FILE).write_bytes(first)
    set_aside(tmp_path)
    assert (tmp_path / "earlier" / EVENTS_FILE).is_file()


def test_a_picture_is_not_drawn_through_a_link(tmp_path: Path, scenario: Scenario) -> None:
    (tmp_path / PICTURE_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"run\.png must be a plain file of yours"):
        illustrate(tmp_path, scenario, {})


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    with OwnFolder(tmp_path) as folder:
        folder.replace(REPORT_FILE, b"before")
        (tmp_path / f"{REPORT_FILE}.new").write_text("left by one that was killed")
        folder.replace(REPORT_FILE, b"after")
        with pytest.raises(TypeError):
            folder.replace(REPORT_FILE, "no bytes")  # type: ignore[arg-type]
    found = tmp_path / REPORT_FILE
    assert found.read_bytes() == b"after" and stat.S_IMODE(found.stat().st_mode) & 0o022 == 0
