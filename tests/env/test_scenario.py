"""Scenarios: the shipped ones load, and every mistake is named in one line."""

from __future__ import annotations

import copy
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from env.errors import InputError, exit_on_bad_input
from env.physics.parameters import HOST_FIELDS
from env.scenario import (
    PROFILE_FOLDER,
    SCENARIO_FOLDER,
    Scenario,
    load_scenario,
    profile_names,
    scenario_names,
)
from env.simulator.machine import EpisodeFactory

Content = dict[str, Any]
Edit = Callable[[Content], object]


def shipped_content() -> Content:
    content: Content = yaml.safe_load((SCENARIO_FOLDER / "cca-2025.yaml").read_text())
    return content


def write(folder: Path, edit: Edit) -> Path:
    content = copy.deepcopy(shipped_content())
    edit(content)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def complaint(path: Path) -> str:
    """What a user is told who runs that file."""
    with pytest.raises(InputError) as caught:
        EpisodeFactory(load_scenario(path))
    return str(caught.value)


def put(part: str, field: str, value: object) -> Edit:
    def edit(content: Content) -> None:
        content[part][field] = value

    return edit


def put_job(index: int, field: str, value: object) -> Edit:
    def edit(content: Content) -> None:
        content["jobs"][index][field] = value

    return edit


# --- what is shipped --------------------------------------------------------------------------


@pytest.mark.parametrize("name", scenario_names())
def test_a_shipped_scenario_loads_with_its_profile(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.profile in profile_names()
    assert EpisodeFactory(scenario).observation_size > 0


def test_the_official_scenarios_are_shipped() -> None:
    assert {"cca-2025", "cca-2024"} <= set(scenario_names())
    latest, earlier = load_scenario("cca-2025"), load_scenario("cca-2024")
    assert (latest.service.slo_us, latest.load.qps_min, latest.load.qps_max) == (800, 5000, 180000)
    assert (earlier.service.slo_us, earlier.load.qps_min, earlier.load.qps_max) == (
        1000, 5000, 100000,
    )  # fmt: skip
    wanted = {"blackscholes", "canneal", "dedup", "ferret", "freqmine", "radix", "vips"}
    assert set(latest.job_names) == set(earlier.job_names) == wanted


def test_a_file_is_read_like_a_shipped_scenario(tmp_path: Path, scenario: Scenario) -> None:
    path = tmp_path / "anything.yaml"
    path.write_text((SCENARIO_FOLDER / "cca-2025.yaml").read_text())
    assert load_scenario(path) == load_scenario(str(path)) == scenario


def test_siblings_and_physical_cores(scenario: Scenario) -> None:
    machine = scenario.machine
    assert [machine.sibling_of(vcpu) for vcpu in range(4)] == [1, 0, 3, 2]
    assert machine.physical_cores == ((0, 1), (2, 3))
    alone = scenario.with_changes(machine={"smt_siblings": [[1, 2]]}).machine
    assert [alone.sibling_of(vcpu) for vcpu in range(4)] == [-1, 2, 1, -1]
    assert alone.physical_cores == ((0,), (1, 2), (3,))


def test_the_launch_command_carries_the_threads(scenario: Scenario) -> None:
    radix = scenario.jobs[scenario.job_names.index("radix")]
    assert radix.launch_command(2) == tuple(
        "2" if part == "{threads}" else part for part in radix.command
    )
    assert "2" in radix.launch_command(2)


def test_a_thread_count_that_the_job_does_not_allow(scenario: Scenario) -> None:
    radix = scenario.jobs[scenario.job_names.index("radix")]
    with pytest.raises(InputError, match=r"job radix: 3 threads; allowed are 1, 2, 4$"):
        radix.launch_command(3)


def test_changes_are_validated(scenario: Scenario) -> None:
    faster = scenario.with_changes(load={"interval_s": 5.0})
    assert faster.load.interval_s == 5.0
    assert faster.load.qps_max == scenario.load.qps_max
    assert scenario.load.interval_s == 10.0
    with pytest.raises(InputError, match=r"load\.interval_s"):
        scenario.with_changes(load={"interval_s": 0.0})


def test_given_delays_replace_the_measured_ones(scenario: Scenario) -> None:
    slow = EpisodeFactory(scenario.with_changes(delays={"container_start_s": 7.5}))
    usual = EpisodeFactory(scenario)
    at = HOST_FIELDS.index("container_start_s")
    hosts = {}
    for name, factory in (("slow", slow), ("usual", usual)):
        row = factory.new_hosts(1)
        factory.begin(row, factory.new_targets(1), 0, 1, np.random.default_rng(1))
        hosts[name] = row[0]["host_params"].tolist()
    assert hosts["slow"].pop(at) == 7.5
    assert hosts["usual"].pop(at) != 7.5
    assert hosts["slow"] == hosts["usual"]


def test_a_profile_may_be_a_file_beside_the_scenario(tmp_path: Path, scenario: Scenario) -> None:
    own = tmp_path / "profile.yaml"
    own.write_text((PROFILE_FOLDER / f"{scenario.profile}.yaml").read_text())
    moved = load_scenario(write(tmp_path, lambda c: c.update(profile="profile.yaml")))
    assert moved.profile == str(own)
    assert EpisodeFactory(moved).profile == EpisodeFactory(scenario).profile


def test_jobs_that_no_profile_knows_load_where_they_are_to_be_measured(tmp_path: Path) -> None:
    path = write(tmp_path, put_job(6, "name", "pack"))
    assert load_scenario(path, unmeasured=True).job_names[6] == "pack"
    with pytest.raises(InputError) as fault:
        load_scenario(path)
    said = str(fault.value)
    assert "unknown job pack;" in said and "\n" not in said
    assert f"python -m training.characterise --scenario {path} --out DIR measures it" in said


# --- mistakes ---------------------------------------------------------------------------------

MISTAKES: list[tuple[str, Edit, tuple[str, ...]]] = [
    # what is wrong, the edit, what the line must name: the field, then what is allowed
    ("unknown field", put("service", "slo_ms", 0.8), ("service.slo_ms", "slo_us", "core_choices")),
    ("unknown part", lambda c: c.update(cpu=4), ("cpu", "machine", "control")),
    ("unknown job field", put_job(2, "cores", 3), ("jobs.2.cores", "threads", "memory_mib")),
    ("misspelt field", lambda c: c["service"].update(slo=c["service"].pop("slo_us")),
     ("service.slo:", "unknown", "slo_us")),
    ("missing field", lambda c: c["service"].pop("slo_us"), ("service.slo_us", "required")),
    ("unknown job", put_job(6, "name", "lu_cb"), ("jobs", "lu_cb", "blackscholes", "vips")),
    ("job twice", put_job(6, "name", "radix"), ("jobs", "radix", "twice")),
    ("unknown profile", lambda c: c.update(profile="cca-1999"),
     ("profile", "cca-1999", "cca-2025", "cca-2024")),
    ("profile that is not there", lambda c: c.update(profile="nowhere.yaml"),
     ("profile", "nowhere.yaml", "cannot be read")),
    ("profile that is none", lambda c: c.update(profile="mine.yaml"),
     ("profile", "mine.yaml", "cannot be read")),
    ("no threads", put_job(0, "threads", [0, 1]), ("jobs.0.threads.0", "greater than 0")),
    ("empty threads", put_job(0, "threads", []), ("jobs.0.threads", "at least 1")),
    ("unsorted threads", put_job(0, "threads", [2, 1]), ("jobs.0", "threads", "rising")),
    ("no memory", put_job(0, "memory_mib", 0), ("jobs.0.memory_mib", "greater than 0")),
    ("too much memory", put_job(0, "memory_mib", 99999), ("memory_mib", "99999", "32768")),
    ("no command", put_job(0, "command", []), ("jobs.0.command", "at least 1")),
    ("no jobs", lambda c: c.update(jobs=[]), ("jobs", "at least 1")),
    ("no vCPUs", put("machine", "vcpus", 0), ("machine.vcpus", "greater than or equal to 2")),
    ("negative memory", put("machine", "memory_mib", -1), ("machine.memory_mib", "greater than 0")),
    ("SLO of zero", put("service", "slo_us", 0), ("service.slo_us", "greater than 0")),
    ("infinite SLO", put("service", "slo_us", float("inf")), ("service.slo_us", "finite")),
    ("negative load", put("load", "qps_min", -5), ("load.qps_min", "greater than 0")),
    ("load upside down", put("load", "qps_min", 180001), ("load", "qps_min", "qps_max")),
    ("load past mcperf", put("load", "qps_max", 2**31), ("load.qps_max", "less than")),
    ("no interval", put("load", "interval_s", 0), ("load.interval_s", "equal to 0.01")),
    ("endless", put("load", "duration_s", float("inf")), ("load.duration_s", "finite")),
    ("interval beyond the end", put("load", "interval_s", 9999), ("load", "interval_s", "longer")),
    ("no period", put("control", "period_s", 0), ("control.period_s", "equal to 0.001")),
    ("hold below period", put("control", "hold_s", 0.001), ("control", "hold_s", "period_s")),
    ("sibling that does not exist", put("machine", "smt_siblings", [[0, 1], [2, 4]]),
     ("machine", "smt_siblings", "4", "0 to 3")),
    ("two siblings", put("machine", "smt_siblings", [[0, 1], [1, 2]]),
     ("machine", "smt_siblings", "vCPU 1", "one sibling")),
    ("core that does not exist",
     lambda c: c["service"].update(core_choices=[[0], [0, 4]], overflow_cores=[]),
     ("core_choices", "4", "0 to 3")),
    ("only core that does not exist", put("service", "core_choices", [[7]]),
     ("service.core_choices", "vCPU 7", "0 to 3")),
    ("part that is a list", lambda c: c.update(load=[]), ("load: must be a mapping",)),
    ("overflow that does not exist", put("service", "overflow_cores", [0, 1, 4]),
     ("overflow_cores", "4", "0 to 3")),
    ("overflow no larger", put("service", "overflow_cores", [0, 1]),
     ("overflow_cores", "largest of core_choices")),
    ("no core", put("service", "core_choices", [[], [0]]), ("core_choices", "at least one")),
    ("no choice", put("service", "core_choices", []), ("service.core_choices", "at least 1")),
    ("choices that jump", put("service", "core_choices", [[0], [1]]),
     ("core_choices", "contain the one before")),
    ("not a number", put("service", "slo_us", "fast"), ("service.slo_us", "number")),
    ("no member", put("service", "members", 0), ("service.members", "greater than or equal to 1")),
    ("too many members", put("service", "members", 17), ("service.members", "equal to 16")),
    ("replicas above members", put("service", "replicas", 2), ("service", "2 of 1 members")),
    (
        "nutcracker and replicas",
        lambda c: c["service"].update(members=2, replicas=2, threads=3, proxy="nutcracker"),
        ("replicas", "nutcracker keeps one"),
    ),
    (
        "nutcracker and workers",
        lambda c: c["service"].update(members=2, threads=4, proxy="nutcracker"),
        ("threads", "nutcracker and each member have one"),
    ),
    ("nobody to replicate", lambda c: c["service"].update(members=2, replicas=2), ("proxy",)),
    ("no such proxy", put("service", "proxy", "mcrouter"), ("service.proxy", "'memcached'")),
    ("processes without a thread", lambda c: c["service"].update(members=3), ("2 in 3 proc",)),
    ("not a name", lambda c: c.update(name="../up"), ("name", "pattern")),
    ("field with a line break", put("load", "a\nb", 1), ("load.a", "interval_s")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "named"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_a_mistake_is_named_in_one_line(tmp_path: Path, edit: Edit, named: tuple[str, ...]) -> None:
    path = write(tmp_path, edit)
    message = complaint(path)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(path))
    for word in named:
        assert word in message.removeprefix(str(path)), word


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name: a\nload: b: c\n", ("not valid YAML", "line 2")),
        ("name: a\n\tb: 1\n", ("not valid YAML",)),
        ("", ("must be a mapping; allowed are name,", "service", "jobs")),
        ("- 1\n- 2\n", ("must be a mapping; allowed are name,",)),
        ("just words", ("must be a mapping; allowed are name,",)),
        ("name: 2001-99-99\n", ("not valid YAML",)),  # a date to YAML, but none there is
        ("a: " + "[" * 3000, ("not valid YAML",)),
    ],
    ids=["two colons", "tab", "empty", "list", "text", "no such date", "too deep"],
)
def test_a_file_that_is_no_scenario(tmp_path: Path, text: str, named: tuple[str, ...]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    message = complaint(path)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(path))
    for word in named:
        assert word in message


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cca-2025" in complaint(path)


@pytest.mark.parametrize("name", ["cca-1999", "no/such/file.yaml", "."])
def test_a_scenario_that_does_not_exist(name: str) -> None:
    message = complaint(Path(name))
    assert message.startswith(f"{name}: ")
    assert "cca-2024, cca-2025" in message
    assert len(message.splitlines()) == 1


# --- on the command line ----------------------------------------------------------------------


def test_bad_input_ends_a_command_with_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, put("service", "slo_us", 0))
    with pytest.raises(SystemExit) as caught, exit_on_bad_input():
        load_scenario(path)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        f"coretide: {path}: service.slo_us: must be greater than 0, not 0"
    ]


def test_names_and_paths_have_no_effect_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "\x1b[2J"
    folder.mkdir()
    path = write(folder, put("load", "a\x1b]0;b\x07", 1))
    for wrong in (path, folder / "none\n\x9b.yaml"):
        with pytest.raises(SystemExit), exit_on_bad_input():
            load_scenario(wrong)
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 2
    assert shown.replace("\n", "").isprintable()


def test_a_message_is_one_line_whatever_the_file_has_put_into_it() -> None:
    hostile = "two\nlines\r\x1b[31m\x1c\u2028"
    assert str(InputError(f"x.yaml: {hostile}")) == r"x.yaml: two\nlines\r\x1b[31m\x1c\u2028"


def test_a_bug_is_not_taken_for_bad_input() -> None:
    with pytest.raises(ZeroDivisionError), exit_on_bad_input():
        _ = 1 / 0
    with pytest.raises(ValueError, match="ours"), exit_on_bad_input():
        raise ValueError("ours")


def test_ctrl_c_ends_a_command_with_one_line_and_code_130(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught, exit_on_bad_input("stopped; the page is not written"):
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "coretide: stopped; the page is not written\n"


def test_a_pipe_or_disk_that_is_not_stdout_is_not_taken_for_it() -> None:
    """What has lost a process it talks to would end without a word."""
    for number in (errno.EPIPE, errno.ENOSPC):
        with pytest.raises(OSError, match="of ours"), exit_on_bad_input():
            raise OSError(number, "of ours")


ENDS = """
from env.errors import exit_on_bad_input
with exit_on_bad_input():
    raise BrokenPipeError(32, "of ours")
"""


@pytest.mark.parametrize(("stdout", "code"), [("closed", 1), ("a pipe that nobody reads", 141)])
def test_without_a_reader_a_command_ends_in_silence_and_without_stdout_it_does_not(
    stdout: str, code: int
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    shell = ["sh", "-c", 'exec "$@" >&-', "sh"] if stdout == "closed" else []
    done = subprocess.run(
        [*shell, sys.executable, "-c", ENDS], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == code and ("of ours" in done.stderr) == (code == 1)


@pytest.mark.parametrize(("raised", "code"), [("KeyboardInterrupt", 130), ("InputError('bad')", 2)])
def test_what_ends_a_command_is_one_line_also_where_its_reader_ends_with_it(
    raised: str, code: int
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    lines = f"from env.errors import *\nwith exit_on_bad_input():\n print(1)\n raise {raised}"
    done = subprocess.run(
        [sys.executable, "-E", "-c", lines], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == code and len(done.stderr.splitlines()) == 1


def test_good_input_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with exit_on_bad_input():
        load_scenario("cca-2025")
    assert capsys.readouterr() == ("", "")
