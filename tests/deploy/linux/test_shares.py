"""How memcached's workers divide its vCPUs: every vCPU is used, and none by more than its part."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.linux.service_process import shares

CORES = st.sets(st.integers(0, 63), min_size=1, max_size=16).map(sorted)
WORKERS = st.integers(1, 20)


@given(WORKERS, CORES)
def test_all_vcpus_are_used_and_no_other(workers: int, cores: list[int]) -> None:
    found = shares(workers, cores)
    assert len(found) == workers
    assert all(found), "a worker has nowhere to run"
    assert set().union(*found) == set(cores)


@given(WORKERS, CORES)
def test_workers_that_can_are_apart(workers: int, cores: list[int]) -> None:
    found = shares(workers, cores)
    if workers <= len(cores):
        assert sum(map(len, found)) == len(cores), "two workers may meet"
        assert max(map(len, found)) - min(map(len, found)) <= 1
        return
    alone = Counter(share for share in found if len(share) == 1)
    if len(cores) > 1:
        assert set(alone.values()) == {workers // len(cores)}
        assert found.count(tuple(cores)) == workers % len(cores), "who is left over is not held"


@pytest.mark.parametrize(
    ("workers", "cores", "expected"),
    [
        (2, [0, 1], [(0,), (1,)]),
        (3, [0, 1], [(0,), (1,), (0, 1)]),
        (4, [0, 1], [(0,), (1,), (0,), (1,)]),
        (2, [0, 1, 2, 3], [(0, 1), (2, 3)]),
        (1, [0, 2], [(0, 2)]),
        (2, [3], [(3,), (3,)]),
        (0, [0, 1], []),
    ],
)
def test_examples(workers: int, cores: list[int], expected: list[tuple[int, ...]]) -> None:
    assert shares(workers, cores) == expected
