"""Reading YAML: plain values come back, whatever is hostile ends in one line, quickly."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.errors import InputError
from env.inputs.yaml_files import LONGEST_SCALAR, MOST_BYTES, MOST_DEPTH, MOST_VALUES, read_yaml
from env.scenario import SCENARIO_FOLDER, scenario_names


def read(folder: Path, content: str | bytes) -> Any:
    path = folder / "file.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_yaml(path, "a file")


def test_what_stands_twice_may_be_written_once(tmp_path: Path) -> None:
    assert read(tmp_path, "a: &x [1, {b: 2}]\nc: *x\n")["c"] == [1, {"b": 2}]


def test_plain_values_come_back(tmp_path: Path) -> None:
    assert read(tmp_path, "a: [1, 2.5, x]\nb: {c: null}\n") == {
        "a": [1, 2.5, "x"],
        "b": {"c": None},
    }
    assert read(tmp_path, "") is None


@pytest.mark.parametrize("name", scenario_names())
def test_shipped_scenarios_are_far_from_the_limits(name: str) -> None:
    assert read_yaml(SCENARIO_FOLDER / f"{name}.yaml", "a scenario")["name"] == name


@pytest.mark.parametrize("content", ["{[a]: 1}", "? {a: 1}\n: 2\n", "- {[]: 1}"])
def test_a_key_is_a_single_value(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match="at line 1: a key must be a single value"):
        read(tmp_path, content)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))
"""A small file that would be two thousand million texts."""

DEEP = "a0: &a0 [[x]]\n" + "".join(f"a{n}: &a{n} [[*a{n - 1}]]\n" for n in range(1, 30))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 50_000, f"line 1: nested more than {MOST_DEPTH} deep"),
        ("{a: " * 50_000, f"nested more than {MOST_DEPTH} deep"),
        ("- " * 50_000, f"nested more than {MOST_DEPTH} deep"),
        (BOMB, f"more than {MOST_VALUES} values"),
        (DEEP, f"nested more than {MOST_DEPTH} deep"),
        ("a: &a [*a]", "line 1: *a stands for nothing before it"),
        ("a: *b", "*b stands for nothing before it"),
        ("? [a, b]\n: 1", "a key must be a single value"),
        ('a: !!int ""', "tags (tag:yaml.org,2002:int) are not allowed"),
        ("a: 1\nb: 2\na: 3\n", "line 3: a is given twice"),
        ("a:\n  b: 1\n  b: 2\n", "line 3: b is given twice"),
        ("- 1\n" * (MOST_VALUES + 1), f"more than {MOST_VALUES} values"),
        ("9" * (LONGEST_SCALAR + 1), f"a value of more than {LONGEST_SCALAR} characters"),
        ("a: 1\nb: 0x" + "f" * 4000, "line 2: an integer of more than 64 bits"),
        ("1:" * 4000 + "1", "an integer of more than 64 bits"),
        ("9" * 9000, "cannot be read"),
        ("a: 2026-13-45", "cannot be read"),
        ("!!python/object/apply:os.system [id]", "line 1"),
        ("[1, 2}", "line 1"),
        ("a: \x07", "not valid YAML"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b" " * (MOST_BYTES + 1), "larger than 1 MiB"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_hostile_or_wrong_is_one_line(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    began = time.perf_counter()
    try:
        read(tmp_path, content)
        assert not message
    except InputError as error:
        assert message in str(error)
        assert str(tmp_path / "file.yaml") in str(error)
        assert "\n" not in str(error)
    assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "nothing"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "file.yaml"
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(InputError, match="cannot be read as a scenario: "):
        read_yaml(path, "a scenario")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab:-[]{}&*!#,|>'\"\n 01.~?%@", max_size=200))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        read_yaml(path, "a file")
    except InputError as error:
        assert "\n" not in str(error)
