import math
from itertools import pairwise

import pytest

from training.calibration.logs.traces import JobTrace, between, mask_at, stretches

SERVICE = ((-math.inf, 0b0011), (20.0, 0b0001), (40.0, 0b0011))
RADIX = JobTrace("radix", 10.0, 50.0, 2, ((10.0, 0b1100), (30.0, 0b1110)), ((35.0, 45.0),))
VIPS = JobTrace("vips", 45.0, 60.0, 1, ((45.0, 0b0100),), ())


def test_a_stretch_ends_where_anything_changes():
    pieces = stretches(SERVICE, (RADIX, VIPS))
    edges = [piece.begin_s for piece in pieces] + [pieces[-1].end_s]
    assert edges == [-math.inf, 10.0, 20.0, 30.0, 35.0, 40.0, 45.0, 50.0, 60.0, math.inf]
    assert all(one.end_s == other.begin_s for one, other in pairwise(pieces))


@pytest.mark.parametrize(
    ("at_s", "service", "jobs"),
    [
        (0.0, 0b0011, {}),
        (10.0, 0b0011, {"radix": 0b1100}),
        (34.0, 0b0001, {"radix": 0b1110}),
        (36.0, 0b0001, {}),  # radix is paused
        (46.0, 0b0011, {"radix": 0b1110, "vips": 0b0100}),
        (55.0, 0b0011, {"vips": 0b0100}),
        (60.0, 0b0011, {}),
    ],
)
def test_a_stretch_says_who_had_which_vcpus(at_s, service, jobs):
    (piece,) = between(stretches(SERVICE, (RADIX, VIPS)), at_s, at_s + 0.5)
    assert piece.service_cores == service == mask_at(SERVICE, at_s)
    assert {running.job.name: running.cores for running in piece.jobs} == jobs
    assert piece.length_s == 0.5


def test_a_part_of_a_run_is_cut_at_its_ends():
    pieces = list(between(stretches(SERVICE, (RADIX,)), 15.0, 40.0))
    assert [(piece.begin_s, piece.end_s) for piece in pieces] == [
        (15.0, 20.0),
        (20.0, 30.0),
        (30.0, 35.0),
        (35.0, 40.0),
    ]
