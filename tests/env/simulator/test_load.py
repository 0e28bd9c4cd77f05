from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.simulator.load import (
    MODULUS,
    PUBLISHED_SEEDS,
    PURPOSES,
    LoadTrace,
    Purpose,
    dynamic_targets,
    initial_state,
    interval_count,
    trace_seeds,
)

# The first targets that mcperf itself announces for 5000 to 180000 queries/s.
# fmt: off
ANNOUNCED = {
    2333: [
        8195, 158594, 149766, 10382, 170548, 150565, 137144, 143496, 144743, 116745, 129314,
        144723, 117379, 119931, 132052, 143350, 143518, 172981, 94027, 170019,
    ],
    3274: [
        9484, 119578, 154073, 113596, 53990, 157669, 9212, 110542, 7875, 37295, 107518,
        104613, 106597, 38091, 10843, 46726, 65041, 40676, 57998, 152264,
    ],
    42: [
        5057, 96805, 133702, 51079, 70840, 39350, 175782, 94658, 97831, 49994, 23740,
        147714, 162599, 84107, 47944, 48297, 37948, 61583, 23105, 146294,
    ],
    1: [
        5001, 28019, 137234, 85265, 98236, 43318, 13233, 123804, 123880, 168575, 72114,
        95900, 150422, 11050, 14356, 97700, 122454, 6347, 72099, 16697,
    ],
    7: [
        5009, 166138, 55617, 41847, 132643, 98227, 62631, 136612, 137141, 100001, 124793,
        116288, 147936, 47351, 70492, 128886, 127161, 14430, 124687, 86883,
    ],
}
# fmt: on

MEASURED = Path(__file__).parents[4] / "shared/data/mcperf_targets.json"

seeds = st.integers(1, MODULUS)
ranges = st.tuples(st.integers(1, 400_000), st.integers(0, 400_000)).map(
    lambda r: (r[0], r[0] + r[1])
)


@pytest.mark.parametrize("seed", ANNOUNCED)
def test_targets_are_those_of_mcperf(seed: int) -> None:
    assert dynamic_targets(seed, 5_000, 180_000, 20).tolist() == ANNOUNCED[seed]


@pytest.mark.skipif(not MEASURED.exists(), reason="the measured targets lie outside the clone")
def test_all_recorded_targets_are_those_of_mcperf() -> None:
    recorded = json.loads(MEASURED.read_text())
    for seed, targets in recorded["targets"].items():
        ours = dynamic_targets(int(seed), recorded["qps_min"], recorded["qps_max"], recorded["n"])
        assert ours.tolist() == targets


@given(seeds, ranges, st.integers(1, 50), st.integers(0, 50))
def test_targets_are_bounded_repeatable_and_extendable(
    seed: int, bounds: tuple[int, int], count: int, more: int
) -> None:
    short = dynamic_targets(seed, *bounds, count)
    long = dynamic_targets(seed, *bounds, count + more)
    assert short.dtype == np.int64
    assert bounds[0] <= long.min() and long.max() <= bounds[1]
    assert short.tolist() == long[:count].tolist()


def test_rejected_draws_are_drawn_again() -> None:
    # With a span just above half of the range, nearly every second draw is refused.
    hi = (MODULUS - 2) // 2 + 1
    targets = dynamic_targets(1, 1, hi, 1000)
    x = 1
    accepted: list[int] = []
    while len(accepted) < 1000:
        x = 16_807 * x % MODULUS
        if x - 1 < hi:
            accepted.append(x)
    assert targets.tolist() == accepted


def test_largest_seed_and_span() -> None:
    assert initial_state(MODULUS) == 1
    assert dynamic_targets(MODULUS, 1, MODULUS - 2, 2).tolist() == [16_807, 282_475_249]


@given(seeds, ranges, st.integers(1, 300))
def test_targets_are_those_drawn_one_by_one(seed: int, bounds: tuple[int, int], count: int) -> None:
    lo, hi = bounds
    bucket = (MODULUS - 2) // (hi - lo + 1)
    x = initial_state(seed)
    expected: list[int] = []
    while len(expected) < count:
        x = 16_807 * x % MODULUS
        if x - 1 < bucket * (hi - lo + 1):
            expected.append(lo + (x - 1) // bucket)
    assert dynamic_targets(seed, lo, hi, count).tolist() == expected


@pytest.mark.parametrize(
    ("seed", "qps_min", "qps_max", "count", "message"),
    [
        (0, 5_000, 180_000, 1, "from the clock"),
        (-1, 5_000, 180_000, 1, "seed must be"),
        (MODULUS + 1, 5_000, 180_000, 1, "seed must be"),
        (1, 0, 180_000, 1, "qps_min must be"),
        (1, 180_000, 5_000, 1, "qps_max must be"),
        (1, 1, MODULUS - 1, 1, "qps_max must be"),
        (1, 5_000, 180_000, 0, "count must be"),
    ],
)
def test_bad_parameters_are_refused(
    seed: int, qps_min: int, qps_max: int, count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dynamic_targets(seed, qps_min, qps_max, count)


@pytest.mark.parametrize(
    ("duration_s", "interval_s", "count"), [(1800, 10, 180), (1801, 10, 181), (5, 10, 1)]
)
def test_interval_count_rounds_up(duration_s: float, interval_s: float, count: int) -> None:
    assert interval_count(duration_s, interval_s) == count


@pytest.mark.parametrize("length", [0, -1, float("nan"), float("inf")])
def test_lengths_are_positive(length: float) -> None:
    with pytest.raises(ValueError, match="duration_s must be"):
        interval_count(length, 10)
    with pytest.raises(ValueError, match="interval_s must be"):
        interval_count(1800, length)
    with pytest.raises(ValueError, match="interval_s must be"):
        LoadTrace.explicit([1000], length)


def test_dynamic_trace() -> None:
    trace = LoadTrace.dynamic(2333, 10, 5_000, 180_000, 195)
    assert trace == LoadTrace(tuple(ANNOUNCED[2333]), 10)


def test_explicit_trace() -> None:
    assert LoadTrace.explicit(np.array([3000, 1000]), 5).targets == (3000, 1000)
    for targets, message in [([], "one step"), ([1000, 0], "at least 1"), ([1.5], "whole")]:
        with pytest.raises(ValueError, match=message):
            LoadTrace.explicit(targets, 5)  # type: ignore[arg-type]


def test_scan_includes_a_stop_that_a_step_meets() -> None:
    assert LoadTrace.scan(5_000, 20_000, 5_000, 2).targets == (5_000, 10_000, 15_000, 20_000)
    assert LoadTrace.scan(5_000, 19_999, 5_000, 2).targets == (5_000, 10_000, 15_000)
    with pytest.raises(ValueError, match="step must be"):
        LoadTrace.scan(5_000, 20_000, 0, 2)
    with pytest.raises(ValueError, match="stop must be"):
        LoadTrace.scan(5_000, 4_000, 1_000, 2)


@given(st.lists(st.integers(0, 2**128), min_size=3, max_size=3))
def test_purposes_share_no_seed_whatever_their_entropy(entropies: list[int]) -> None:
    sets = [
        set(trace_seeds(e, 50, purpose)) for e, purpose in zip(entropies, PURPOSES, strict=True)
    ]
    assert len(set.union(*sets)) == 150


@pytest.mark.parametrize("purpose", PURPOSES)
def test_trace_seeds_are_distinct_valid_and_spread(purpose: Purpose) -> None:
    drawn = trace_seeds(0, 2_000, purpose)
    assert trace_seeds(0, 100, purpose) == drawn[:100]
    assert len(set(drawn)) == 2_000
    assert {seed % 3 for seed in drawn} == {(PURPOSES.index(purpose) + 1) % 3}
    assert min(drawn) >= 1
    assert max(drawn) <= MODULUS - 1
    assert PUBLISHED_SEEDS.isdisjoint(drawn)
    first = [int(dynamic_targets(seed, 5_000, 180_000, 1)[0]) for seed in drawn]
    assert np.histogram(first, bins=10, range=(5_000, 180_000))[0].min() > 150


def test_trace_seeds_refuse_bad_parameters() -> None:
    for entropy, count, purpose in [(-1, 1, "report"), (0, -1, "report"), (0, 1, "other")]:
        with pytest.raises(ValueError, match="must be"):
            trace_seeds(entropy, count, purpose)  # type: ignore[arg-type]


def run_cli(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "env.simulator.load", *options],
        capture_output=True,
        text=True,
        check=False,
    )


def test_cli_prints_one_target_per_line() -> None:
    result = run_cli("--seed", "3274", "--qps-min", "5000", "--qps-max", "180000", "--count", "20")
    assert (result.returncode, result.stderr) == (0, "")
    assert [int(line) for line in result.stdout.splitlines()] == ANNOUNCED[3274]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--seed", "0"], "--seed must be from 1"),
        (["--seed", "x"], "--seed: must be a whole number"),
        ([], "--seed"),
        (["--seed", "1", "--qps-min", "9", "--qps-max", "8"], "--qps-max must be from qps-min"),
        (["--seed", "1", "--count", "0"], "--count must be at least 1"),
    ],
)
def test_cli_refuses_bad_input_in_one_line(options: list[str], named: str) -> None:
    result = run_cli(*options)
    assert (result.returncode, result.stdout) == (2, "")
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
