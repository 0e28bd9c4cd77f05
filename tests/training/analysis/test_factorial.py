"""The 2^k r analysis against the worked examples of Jain's book."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from env.errors import InputError
from training.analysis.effects import analyse, from_table, main

MEMORY_CACHE = [[15, 18, 12], [45, 48, 51], [25, 28, 19], [75, 75, 81]]


def test_memory_and_cache_study_of_jain() -> None:
    """Jain, examples 18.1 to 18.4: effects, variation, deviation and 90 % intervals."""
    study = analyse(["memory", "cache"], MEMORY_CACHE, confidence=0.90)
    mean, memory, cache, both = study.effects
    assert [e.value for e in study.effects] == pytest.approx([41.0, 21.5, 9.5, 5.0])
    assert memory.share == pytest.approx(0.7888, abs=5e-5)
    assert cache.share == pytest.approx(0.1540, abs=5e-5)
    assert both.share == pytest.approx(0.0427, abs=5e-5)
    assert study.error_share == pytest.approx(0.0145, abs=5e-5)
    assert study.deviation == pytest.approx(3.571, abs=5e-4)
    assert (mean.low, mean.high) == pytest.approx((39.08, 42.92), abs=0.01)
    assert (memory.low, memory.high) == pytest.approx((19.58, 23.42), abs=0.01)
    assert (cache.low, cache.high) == pytest.approx((7.58, 11.42), abs=0.01)
    assert (both.low, both.high) == pytest.approx((3.08, 6.92), abs=0.01)
    assert all(effect.significant for effect in study.effects)
    assert both.signs == (1, -1, -1, 1)


def test_shares_add_up_for_three_factors() -> None:
    rng = np.random.default_rng(5)
    study = analyse(["a", "b", "c"], rng.normal(10.0, 1.0, (8, 4)))
    assert len(study.effects) == 8
    assert sum(e.share for e in study.effects) + study.error_share == pytest.approx(1.0)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of an effect that is not there, 95 % intervals leave out 0 in about 5 % of experiments."""
    rng = np.random.default_rng(1)
    found = sum(
        analyse(["a", "b"], rng.normal(50.0, 5.0, (4, 3))).effects[1].significant
        for _ in range(1000)
    )
    assert 30 <= found <= 72  # 4 standard deviations around 50, at most


def test_a_multiplicative_model_finds_factors_that_multiply() -> None:
    rng = np.random.default_rng(2)
    truth = np.array([1.0, 20.0, 5.0, 100.0])[:, None]
    measured = truth * np.exp(rng.normal(0.0, 0.02, (4, 3)))
    additive = analyse(["a", "b"], measured)
    assert any("multiplicative" in line for line in additive.checks())
    product = analyse(["a", "b"], measured, multiplicative=True)
    assert not product.effects[3].significant  # no interaction left
    assert 10 ** (2 * product.effects[1].value) == pytest.approx(20.0, rel=0.05)


def test_checks_tell_skewed_errors_from_normal_ones() -> None:
    rng = np.random.default_rng(3)
    good = analyse(["a", "b"], rng.normal(100.0, 1.0, (4, 20)))
    assert "Errors look normal" in good.checks()[0]
    skewed = analyse(["a", "b"], 100.0 + rng.exponential(5.0, (4, 20)))
    assert "do not look normal" in skewed.checks()[0]


def test_a_tidy_table_becomes_responses_whatever_its_order(tmp_path: Path) -> None:
    rows = [
        {"memory": 4 + 12 * (i & 1), "cache": "big" if i & 2 else "a small one", "mips": y}
        for i, ys in enumerate(MEMORY_CACHE)
        for y in ys
    ]
    table = pd.DataFrame(rows).sample(frac=1.0, random_state=0)
    responses = from_table(table, ["memory", "cache"], "mips")
    assert responses.mean(axis=1) == pytest.approx([15.0, 48.0, 24.0, 77.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mips": None}, "no column 'mips'"),
        ({"memory": [1, 2, 3] * 4}, "memory: takes two levels, has 3"),
        ({"mips": ["fast"] * 12}, "mips: line 2 is not a number"),
    ],
)
def test_a_table_that_does_not_fit_is_named(change: dict, message: str) -> None:
    table = pd.DataFrame({"memory": [1, 2] * 6, "cache": [1] * 6 + [2] * 6, "mips": range(12)})
    for column, values in change.items():
        table = table.drop(columns=column) if values is None else table.assign(**{column: values})
    with pytest.raises(InputError, match=message):
        from_table(table, ["memory", "cache"], "mips")


def test_a_combination_measured_once_is_named() -> None:
    table = pd.DataFrame({"a": [0, 0, 1], "y": [1.0, 2.0, 3.0]})
    with pytest.raises(InputError, match="a=1: 1 runs"):
        from_table(table, ["a"], "y")


def test_the_command_prints_effects_or_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.csv"
    pd.DataFrame({"a": [0, 0, 1, 1], "y": [1.0, 1.1, 3.0, 3.1]}).to_csv(file, index=False)
    line = ["training.factorial", "--csv", str(file), "--factors", "a", "--response"]
    monkeypatch.setattr("sys.argv", [*line, "y"])
    main()
    assert "99." in capsys.readouterr().out  # the factor explains nearly everything
    monkeypatch.setattr("sys.argv", [*line, "z"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    file.write_text(f"a,y\n0,{'9' * 400}\n0,1\n1,1\n1,1\n")
    monkeypatch.setattr("sys.argv", [*line, "y"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
