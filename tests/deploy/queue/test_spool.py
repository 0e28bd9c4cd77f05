"""A queue's folder: jobs are in one place each, whoever wrote their files and whatever crashed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from deploy.queue import queue_commands, spool
from deploy.queue.spool import Ending, Scan, Spool, settle
from deploy.queue.submitted import MOST_BYTES, parse_job
from deploy.records.proof import CANCELLED
from deploy.records.state import JobRecord, State, StateFolder
from env.errors import InputError
from env.scenario import MAX_JOBS, Scenario, load_scenario

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load_scenario("cca-2025").with_jobs(())


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Spool]:
    with Spool(tmp_path / "queue") as opened:
        yield opened


def describe(name: str, **changes: object) -> str:
    job = {"name": name, "command": ["true"], "threads": [1, 2], "memory_mib": 64}
    return yaml.safe_dump({**job, "image": "an:image", **changes})


def drop(queue: Spool, file: str, text: str) -> Path:
    path = queue.path / file
    path.write_text(text)
    return path


def scan(
    queue: Spool,
    scenario: Scenario,
    room: int = 0,
    known: Sequence[str] = (),
    over: Sequence[Ending] = (),
) -> Scan:
    """Two scans: what was handed in is taken once it has not changed between them."""
    queue.scan(scenario, True, (), 0, ())
    return queue.scan(scenario, True, known, room, over)


def places(queue: Spool, job: str) -> list[str]:
    return [
        str(path.parent.relative_to(queue.path)) for path in sorted(queue.path.rglob(f"{job}.yaml"))
    ]


def reason(queue: Spool, file: str) -> str:
    text = (queue.path / "refused" / f"{file}.txt").read_text()
    assert text.count("\n") == 1 and text.endswith("\n")
    return text


# --- the way of a job -------------------------------------------------------------------------


def test_a_job_goes_from_its_file_to_its_outcome(queue: Spool, scenario: Scenario) -> None:
    queue.submit(describe("one").encode(), "one.yaml")
    assert places(queue, "one") == ["."]
    assert scan(queue, scenario).waiting == 1
    assert places(queue, "one") == ["accepted"]
    begun = queue.scan(scenario, True, (), 1, ()).begun
    assert [job.name for job in begun] == ["one"]
    assert places(queue, "one") == ["running"]
    over = Ending("one", "done", 0, 1, started="then", ended="now")
    assert queue.scan(scenario, True, ("one",), 1, (over,)).finished == ("one",)
    assert places(queue, "one") == ["done"]
    outcome = json.loads((queue.path / "done" / "one.json").read_text())
    assert (outcome["exit_code"], outcome["attempts"], outcome["ended"]) == (0, 1, "now")
    assert outcome["accepted"]


def test_who_is_accepted_first_begins_first_and_the_others_wait_for_room(
    queue: Spool, scenario: Scenario
) -> None:
    names = [f"job-{number}" for number in range(MAX_JOBS + 3)]
    order = random.Random(4).sample(names, len(names))
    for name in order:
        queue.submit(describe(name).encode(), name)
        if name.endswith("3"):
            scan(queue, scenario)
        time.sleep(0.01)  # the kernel's time stamps are milliseconds apart
    found = scan(queue, scenario, room=MAX_JOBS)
    assert [job.name for job in found.begun] == order[:MAX_JOBS]
    assert found.waiting == 3
    assert queue.names("accepted") == order[MAX_JOBS:]


def test_a_file_that_is_still_written_is_left_alone(queue: Spool, scenario: Scenario) -> None:
    path = drop(queue, "slow.yaml", "name: slow\n")
    for part in ("command: ['true']\n", "threads: [1]\n", "image: x\n"):
        queue.scan(scenario, True, (), 0, ())
        with path.open("a") as file:
            file.write(part)
    drop(queue, ".hidden.yaml", "name: [")
    path.write_text(path.read_text() + "memory_mib: 1\n")
    assert scan(queue, scenario).said == ("slow is accepted",)
    assert (queue.path / ".hidden.yaml").exists()


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (describe("x", threads=[8]), "threads: 8 is more than the machine's 4 vCPUs"),
        (describe("x", memory_mib=1 << 30), "memory_mib: 1073741824 exceeds the machine's"),
        (describe("x", image=""), "image: is required, because jobs run in containers"),
        (describe("x", endless=True), "endless: unknown field; allowed are name, image"),
        (describe("x", arrival_s=3.0), "arrival_s: unknown field"),
        (describe("x", nice=3), "nice: unknown field; allowed are name"),
        (describe("memcached"), "name: must not be memcached or scheduler"),
        (describe("../../etc"), "name: must match the pattern"),
        (describe("x\n"), "name: must match the pattern"),
        (describe("x", command=["a\0b"]), "must not hold a zero byte"),
        (describe("x", command=["a"] * 9 + ["b" * 9000] * 2), "larger than 16 KiB"),
        ("command: [" + "*a, " * 9 + "]", "stands for nothing before it"),
        ("- &a " + "x" * 9000 + "\n" + "- *a\n" * 9, "must be a mapping"),
        ("name: !!python/object/apply:os.system ['true']", "tags"),
        ("[" * 50, "nested more than"),
        ("", "must be a mapping"),
        ("name: x\nname: y\n", "name is given twice"),
    ],
)
def test_a_bad_job_is_refused_in_one_line(
    queue: Spool, scenario: Scenario, text: str, why: str
) -> None:
    drop(queue, "bad.yaml", text)
    (said,) = scan(queue, scenario).said
    assert why in reason(queue, "bad.yaml") and why in said
    assert places(queue, "bad") == ["refused"]


def test_an_alias_does_not_multiply_a_command() -> None:
    part = "x" * 9000
    text = f"name: y\nimage: i\nthreads: [1]\nmemory_mib: 1\ncommand: [&a {part}, *a]\n"
    assert len(text) < MOST_BYTES
    with pytest.raises(InputError, match="command: longer than 16 KiB"):
        parse_job(text.encode(), "y.yaml")


@pytest.mark.parametrize("state", ["accepted", "running", "done", "failed", "cancelled"])
def test_a_name_is_taken_for_good(queue: Spool, scenario: Scenario, state: str) -> None:
    (queue.path / state / "one.yaml").write_text(describe("one"))
    drop(queue, "other.yaml", describe("one"))
    assert f"one is taken, by a job that is {state}" in scan(queue, scenario, known=["one"]).said[0]
    with pytest.raises(InputError, match="name: one is taken"):
        queue.submit(describe("one").encode(), "again.yaml")


def test_the_same_job_is_handed_in_once(queue: Spool) -> None:
    queue.submit(describe("one").encode(), "a.yaml")
    with pytest.raises(InputError, match="one is handed in already"):
        queue.submit(describe("one", memory_mib=1).encode(), "b.yaml")


def test_hostile_files_are_put_aside_and_nothing_behind_them_is_touched(
    queue: Spool, scenario: Scenario, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text(describe("secret"))
    (queue.path / "link.yaml").symlink_to(secret)
    os.mkfifo(queue.path / "pipe.yaml")
    (queue.path / "folder.yaml").mkdir()
    (queue.path / "folder.yaml" / "inner.yaml").write_text(describe("inner"))
    drop(queue, "readme.txt", "hello")
    strange = os.fsdecode(b"\xff\x1b[31m\n" + b"n" * 200 + b".yaml")
    drop(queue, strange, "name: [")
    said = scan(queue, scenario).said
    assert len(said) == 5 and all("\x1b" not in line and "\n" not in line for line in said)
    for name in ("link.yaml", "pipe.yaml", "folder.yaml"):
        assert "plain file of yours" in reason(queue, name)
    assert "must be a file that ends in .yaml" in reason(queue, "readme.txt")
    assert secret.read_text() == describe("secret")
    refused = [path.name for path in (queue.path / "refused").iterdir()]
    assert all(name.isascii() and len(name) < 128 for name in refused)
    assert queue.names("accepted") == []


def test_refused_files_of_one_name_do_not_replace_each_other(
    queue: Spool, scenario: Scenario
) -> None:
    for text in ("[", "{", "- a"):
        drop(queue, "bad.yaml", text)
        scan(queue, scenario)
    assert sorted(path.name for path in (queue.path / "refused").glob("*.txt")) == [
        "bad.yaml.2.txt",
        "bad.yaml.3.txt",
        "bad.yaml.txt",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="files of others need root")
def test_files_and_folders_of_others_are_refused(
    queue: Spool, scenario: Scenario, tmp_path: Path
) -> None:
    os.chown(drop(queue, "theirs.yaml", describe("theirs")), 12345, 12345)
    scan(queue, scenario)
    assert "plain file of yours" in reason(queue, "theirs.yaml")
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(InputError, match="cannot hold a queue: must be a folder of yours"):
        Spool(folder)
    shutil.rmtree(queue.path / "done")
    (queue.path / "done").symlink_to(tmp_path)
    with pytest.raises(InputError, match="done: cannot hold a queue"):
        Spool(queue.path)


def test_a_file_that_changes_after_it_was_accepted_is_refused(
    queue: Spool, scenario: Scenario
) -> None:
    drop(queue, "one.yaml", describe("one"))
    scan(queue, scenario)
    (queue.path / "accepted" / "one.yaml").write_text(describe("two"))
    found = queue.scan(scenario, True, (), 1, ())
    assert found.begun == ()
    assert "name: has become two" in reason(queue, "one.yaml")


# --- crashes ----------------------------------------------------------------------------------


class Crash(BaseException):
    """The loop is killed here."""


def crashing_after(calls: int) -> Callable[..., None]:
    """An audit of the moves and writes that kills at one of them."""
    left = iter(range(calls))

    def count(*_: object) -> None:
        if next(left, None) is None:
            raise Crash

    return count


def test_a_crash_at_any_step_leaves_each_job_in_one_place(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rename, write and removal of two jobs' whole way is the last one once."""
    rename, unlink, finished = os.rename, os.unlink, False
    for calls in range(60):
        path = tmp_path / str(calls)
        audit = crashing_after(calls)

        def counted_rename(*a: object, audit: Callable[..., None] = audit, **k: object) -> None:
            audit()
            rename(*a, **k)  # type: ignore[arg-type]

        def counted_unlink(*a: object, audit: Callable[..., None] = audit, **k: object) -> None:
            audit()
            unlink(*a, **k)  # type: ignore[arg-type]

        with Spool(path) as queue:
            for name in ("one", "two"):
                drop(queue, f"{name}.yaml", describe(name))
            monkeypatch.setattr(spool.os, "rename", counted_rename)
            monkeypatch.setattr(spool.os, "unlink", counted_unlink)
            try:
                scan(queue, scenario, room=1)
                over = (Ending("one", "done", 0, 1),)
                queue.scan(scenario, True, ("one",), 1, over)
                queue.scan(scenario, True, ("two",), 1, (Ending("two", "failed", 3, 4),))
                finished = True
            except Crash:
                pass
            monkeypatch.undo()
        with Spool(path) as queue:
            for name in queue.names("running"):
                queue.recover(name)
            for name in ("one", "two"):
                assert len(places(queue, name)) == 1, (calls, name)
            over_jobs = [name for name in ("one", "two") if queue.is_over(name)]
            assert set(places(queue, "one") + places(queue, "two")) <= {
                *(".", "accepted", "running"),
                *(["done"] if "one" in over_jobs else []),
                *(["failed"] if "two" in over_jobs else []),
            }
        if finished:
            return
    pytest.fail("it never came to its end")


def test_what_a_lost_loop_ran_is_over_by_proof_or_waits_again(
    queue: Spool, scenario: Scenario, tmp_path: Path
) -> None:
    names = ("proved", "broken", "failed", "stopped", "unknown", "asked")
    for name in names:
        queue.submit(describe(name).encode(), name)
        scan(queue, scenario)
    scan(queue, scenario, room=len(names))
    folder = StateFolder(tmp_path / "state")
    state = State("0123456789ab", "x", "process", "", 0.0)
    for name in ("proved", "broken"):
        state.jobs[name] = JobRecord(attempts=2, opened=True)
        proof = folder.attempt_folder(state.nonce, name, 2) / "exit"
        proof.write_text("0\n" if name == "proved" else "open\n")
    state.jobs["failed"] = JobRecord(attempts=4, failures=4, exit_code=3)
    state.jobs["stopped"] = JobRecord(attempts=1, exit_code=CANCELLED)
    (queue.path / "running" / "asked.cancel").touch()
    for _ in range(2):  # a second time, as after a crash, changes nothing
        assert settle(queue, state, folder) == []
    assert queue.names("done") == ["proved"]
    assert queue.names("failed") == ["failed"]
    assert queue.names("cancelled") == ["stopped", "asked"]
    outcome = json.loads((queue.path / "cancelled" / "stopped.json").read_text())
    assert outcome["exit_code"] is None
    assert queue.names("accepted") == ["broken", "unknown"]


def test_what_cannot_be_moved_keeps_no_other_from_its_turn_and_is_said_once(
    queue: Spool, scenario: Scenario
) -> None:
    """Folders in the way of marks, reasons and outcomes stand for what a disk may refuse."""
    for name in ("ended", "runs", "held", "waits"):
        queue.submit(describe(name).encode(), name)
        scan(queue, scenario, room=int(name != "waits"), known=["ended", "runs"])
        if name == "held":
            queue.put_back("held")
            (queue.path / "running" / "held.cancel").mkdir()
    (queue.path / "refused" / "bad.yaml.txt").mkdir()
    drop(queue, "bad.yaml", "[")
    (queue.path / "done" / "ended.json").mkdir()
    over = [Ending(name, "done", 0, 1) for name in ("ended", "runs")]
    said, finished, begun = [], [], []
    for _ in range(5):
        found = queue.scan(scenario, True, ("ended", "runs", *begun), 1, over)
        said += found.said
        finished += found.finished
        begun += [job.name for job in found.begun]
        over = [ending for ending in over if ending.job not in finished]
    assert (finished, begun) == (["runs"], ["waits"])
    for name in ("ended: ", "held: ", "bad.yaml: "):
        assert sum(line.startswith(name) and "tried again" in line for line in said) == 1, said
    for folder in ("refused/bad.yaml.txt", "running/held.cancel", "done/ended.json"):
        (queue.path / folder).rmdir()
    assert scan(queue, scenario, room=1, known=["ended", "waits"], over=over).finished == ("ended",)
    assert places(queue, "bad") == ["refused"] and places(queue, "held") == ["running"]


def test_a_file_that_comes_after_one_that_was_taken_away_is_told_of_anew(
    queue: Spool, scenario: Scenario
) -> None:
    (queue.path / "refused" / "bad.txt").mkdir()  # in the way of the reason
    (queue.path / "done" / "bad.json").mkdir()  # in the way of a job's outcome
    over = (Ending("bad", "done", 0, 1),)
    for _ in range(2):
        drop(queue, "bad", "[")
        said = scan(queue, scenario).said
        assert sum("tried again" in line for line in said) == 1, said
        # A job of the same name is another thing that is stuck.
        for times in (1, 0):
            said = queue.scan(scenario, True, ("bad",), 0, over).said
            assert sum("tried again" in line for line in said) == times, said
        (queue.path / "bad").unlink()
        assert queue.scan(scenario, True, (), 0, ()).said == ()


def test_no_more_is_taken_in_than_may_wait(
    queue: Spool, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MOST_WAITING", 3)
    for number in range(5):  # as many as that were put back
        (queue.path / "accepted" / f"old-{number}.yaml").write_text(describe(f"old-{number}"))
        queue.submit(describe(f"new-{number}").encode(), f"new-{number}")
    assert scan(queue, scenario).said == ()
    assert len(queue.names("accepted")) == 5


@pytest.mark.parametrize("over", [True, False])
def test_a_job_that_cannot_be_moved_leaves_no_other_in_running(
    queue: Spool, scenario: Scenario, tmp_path: Path, over: bool
) -> None:
    for name in ("stuck", "first", "second"):
        (queue.path / "running" / f"{name}.yaml").write_text(describe(name))
    (queue.path / ("done" if over else "accepted") / "stuck.yaml").mkdir()
    if over:
        (queue.path / "done" / "stuck.json").touch()
    (fault,) = settle(queue, None, StateFolder(tmp_path / "state"))
    assert "stuck is left in running: " in fault
    assert queue.names("running") == ["stuck"]
    assert {"first", "second"} <= set(queue.names("accepted"))


def test_a_second_loop_is_kept_off(queue: Spool, tmp_path: Path) -> None:
    queue.lock(tmp_path / "state")
    with Spool(queue.path) as other, pytest.raises(InputError, match="another loop serves"):
        other.lock(tmp_path / "state")


def test_who_knows_nothing_of_the_jobs_that_ran_does_not_begin_them_again(
    queue: Spool, tmp_path: Path
) -> None:
    first, second = StateFolder(tmp_path / "first"), StateFolder(tmp_path / "second")
    with Spool(queue.path) as killed:
        killed.lock(first.path)
        first.begin(State("0" * 12, "x", "process", "", 0.0, queue=str(queue.path.resolve())))
    said = f"was served with --state {first.path}, which knows"
    for damage in ("", "[" * 100_000):  # what it knew is not known to have been settled
        with (first.path / "state.json").open("a") as file:
            file.write(damage)
        with Spool(queue.path) as other, pytest.raises(InputError, match=said):
            other.lock(second.path)
    first.clear()
    with Spool(queue.path) as other:
        other.lock(second.path)
    with Spool(queue.path) as again:
        again.lock(first.path)


# --- what users ask for -----------------------------------------------------------------------


def test_waiting_jobs_are_cancelled_at_once_and_running_ones_by_the_loop(
    queue: Spool, scenario: Scenario
) -> None:
    for name in ("first", "second", "third"):
        queue.submit(describe(name).encode(), name)
        if name != "third":
            scan(queue, scenario, room=int(name == "first"))
    assert queue.cancel("first") == "first runs; the loop ends it"
    for name in ("second", "third"):
        assert queue.cancel(name) == f"{name} is cancelled; it had not begun"
        assert json.loads((queue.path / "cancelled" / f"{name}.json").read_text())["job"] == name
    assert queue.scan(scenario, True, ("first",), 0, ()).cancelled == ("first",)
    for name in ("second", "none", "../done/first", ""):
        with pytest.raises(InputError):
            queue.cancel(name)


def test_a_cancellation_that_comes_too_late_is_not_a_later_jobs(
    queue: Spool, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.submit(describe("one").encode(), "one")
    scan(queue, scenario, room=1)
    write = spool.OwnFolder.replace

    def write_late(folder: spool.OwnFolder, name: str, *content: object, **how: object) -> None:
        if name == "one.cancel":
            queue.finish(Ending("one", "done", 0, 1))
        write(folder, name, *content, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(spool.OwnFolder, "replace", write_late)
    with Spool(queue.path) as user, pytest.raises(InputError, match="no such job waits or runs"):
        user.cancel("one")
    assert places(queue, "one") == ["done"]
    assert not (queue.path / "running" / "one.cancel").exists()


def test_a_mark_that_a_crash_has_left_does_not_cancel_a_later_job(
    queue: Spool, scenario: Scenario
) -> None:
    (queue.path / "running" / "one.cancel").touch()
    queue.submit(describe("one").encode(), "one")
    found = scan(queue, scenario, room=1)
    assert ([job.name for job in found.begun], found.cancelled) == (["one"], ())
    assert not (queue.path / "running" / "one.cancel").exists()


def test_the_list_shows_every_job_and_why_it_ended(
    queue: Spool, scenario: Scenario, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("ended", "runs", "waits"):
        queue.submit(describe(name).encode(), name)
        scan(queue, scenario, room=int(name != "waits"), known=["ended", "runs"])
    queue.finish(Ending("ended", "failed", 3, 4, ended="12:00", why="exit code 3"))
    drop(queue, "bad.yaml", "[")
    scan(queue, scenario, known=["runs"])
    job = tmp_path / "new.yaml"
    job.write_text(describe("new"))
    queue_commands.submit(queue.path, job)
    queue_commands.show(queue.path)
    lines = {line.split()[0]: line for line in capfd.readouterr().out.splitlines()}
    assert "failed" in lines["ended"] and "exit code 3" in lines["ended"]
    assert "running" in lines["runs"] and "accepted" in lines["waits"]
    assert "not valid YAML" in lines["bad.yaml"] and "handed in" in lines["new.yaml"]


@pytest.mark.parametrize("text", ["[" * 16_000, "[]", "{}", '{"ended": {}, "why": 3}', "\xff"])
def test_an_outcome_that_is_none_of_ours_is_said_to_be(queue: Spool, text: str) -> None:
    (queue.path / "done" / "one.yaml").touch()
    (queue.path / "done" / "one.json").write_text(text)
    (line,) = queue.lines()
    assert line.startswith("one ") and line.isprintable()


def test_what_an_outcome_says_moves_no_cursor(queue: Spool) -> None:
    (queue.path / "done" / "one.yaml").touch()
    outcome = {"ended": "\x1b[2J", "why": "\x1b[31m\n"}
    (queue.path / "done" / "one.json").write_text(json.dumps(outcome))
    (line,) = queue.lines()
    assert line.isprintable()


def test_a_file_of_any_name_is_listed_in_one_line(queue: Spool) -> None:
    for state in ("", "accepted", "running", "done"):
        (queue.path / state / os.fsdecode(b"\x1b[2J\xff\n.yaml")).touch()
    (queue.path / "refused" / "one.txt").write_text("\x1b[2J\u2028")
    lines = list(queue.lines())
    assert len(lines) == 5
    assert all(line.isprintable() and line.encode() for line in lines)


@pytest.mark.parametrize("stdout", ["/dev/full", "closed pipe"])
def test_what_was_done_is_not_denied_because_it_cannot_be_told(tmp_path: Path, stdout: str) -> None:
    (tmp_path / "one.yaml").write_text(describe("one"))
    queue = ["--queue", str(tmp_path / "queue")]
    with contextlib.ExitStack() as stack:
        if stdout == "closed pipe":
            reader, writer = os.pipe()
            os.close(reader)
            stack.callback(os.close, writer)
        else:
            writer = stack.enter_context(Path(stdout).open("wb")).fileno()
        ends = {
            option: subprocess.run(
                [sys.executable, "deploy.py", *queue, option, *more],
                cwd=ROOT,
                stdout=writer,
                stderr=subprocess.PIPE,
                text=True,
            )
            for option, *more in (["--submit", str(tmp_path / "one.yaml")], ["--list"])
        }
    assert (ends["--submit"].returncode, ends["--submit"].stderr) == (0, "")
    assert (tmp_path / "queue" / "one.yaml").is_file()
    shown = "" if stdout == "closed pipe" else "coretide: what is printed cannot be written: "
    assert ends["--list"].stderr.startswith(shown) and "queue" not in ends["--list"].stderr
    assert len(ends["--list"].stderr.splitlines()) == bool(shown)


def test_a_pipe_is_no_jobs_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InputError, match="cannot be read as a job: not a regular file"):
        queue_commands.submit(tmp_path / "queue", tmp_path / "pipe.yaml")


def test_commands_refuse_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no queue's folder"):
        queue_commands.show(tmp_path / "nothing")
    with pytest.raises(InputError, match="cannot be read as a job"):
        queue_commands.submit(tmp_path / "queue", tmp_path / "nothing.yaml")
    assert not (tmp_path / "nothing").exists()
