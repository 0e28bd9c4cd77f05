"""The benchmarks' command lines: what is wrong is said in one line, before the work begins."""

import importlib

import pytest

ALL = ("ablations", "baselines", "live", "local", "sharing", "speed", "starts")
COUNTS = {
    "ablations": ("--steps", "--seeds"),
    "baselines": ("--episodes",),
    "local": ("--turns",),
    "sharing": ("--turns",),
    "speed": ("--repetitions", "--rollouts", "--threads", "--seeds", "--steps"),
    "starts": ("--qps", "--turns"),
}


def said(name: str, options: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main(options)
    assert end.value.code == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


@pytest.mark.parametrize("name", ALL)
def test_every_option_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(name, ["--help"], 0, capsys)
    assert f"usage: python -m benchmarks.{name} " in shown
    options = shown.split("options:")[1].split("\n  -")[1:]
    assert all(len(option.split("  ", 1)) == 2 for option in options)


@pytest.mark.parametrize("value", ["0", "-1", "x"])
@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, all_ in COUNTS.items() for option in all_]
)
def test_counts_are_whole_numbers(
    name: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(name, [option, value], 2, capsys)
    assert f"{option}: must be a whole number of at least 1" in shown and shown.count("\n") == 1


@pytest.mark.parametrize("name", [name for name in ALL if name != "starts"])
def test_a_file_that_cannot_be_written_is_told_first(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(name, ["--json", "/proc/no/such.json"], 2, capsys)
    assert "/proc/no/such.json: cannot be written" in shown and shown.count("\n") == 1
