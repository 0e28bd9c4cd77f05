"""
By how much a client's clock is off, from a load that both sides have seen.

A client says what it got in each of its intervals, the loop has counted memcached's requests from
sample to sample. The load jumps from interval to interval, so the two agree with one shift only,
and a count between two samples tells where in between it jumped.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deploy.records.mcperf import LARGEST, Row
from deploy.records.recorder import Sample

Array = npt.NDArray[np.float64]

MOST_SHIFT_S = 60.0
"""Clocks that differ by more are to be set, not guessed at."""

FINEST_S = 0.005
"""Step of the last search for the shift."""

ODDS = 1000.0
"""How much likelier than any other the shift must be."""

PARTS = 20
"""Into how many parts a run is cut, to see how well the shift is known."""

LONGEST_GAP_S = 5.0
"""Samples further apart do not say when in between the load moved."""


@dataclass(frozen=True)
class Counted:
    """
    Stretches between samples.

    :param start_s: float64[n], when each begins [s]
    :param end_s: float64[n], when each ends [s]
    :param qps: float64[n], memcached's rate in each [requests/s]
    """

    start_s: Array
    end_s: Array
    qps: Array


@dataclass(frozen=True)
class Shift:
    """
    A client's rows by the run's clock.

    :param rows: moved by the shift
    :param shift_s: how much later than its stamps the client's load reached memcached [s]
    :param margin_s: the shift is known to this [s]
    :param correlation: of the client's load and memcached's count, at this shift
    """

    rows: list[Row]
    shift_s: float
    margin_s: float
    correlation: float


def find_shift(candidates: Iterable[list[Row]], counted: Counted) -> Shift | None:
    """
    The shift with which a client's load and memcached's count agree best.

    :param candidates: the rows, with each length that their intervals may have, the likeliest
        first: another one must suit much better
    :param counted: what memcached counted, on the clock that the rows are to be moved to
    :return: None if no shift of at most `MOST_SHIFT_S` suits much better than all others
    """
    enough = 2.0 * math.log(ODDS)
    fits = (_fit(rows, counted) for rows in candidates)
    fit = next(fits)
    for other in fits:
        fit = other if other.gain > fit.gain + enough else fit
    return _refined(fit, counted) if fit.gain - fit.rival >= enough else None


def count_between(samples: Sequence[Sample]) -> Counted:
    """
    The rate at which memcached was asked between samples.

    :param samples: of a run; where the count falls, or is long not read, it says nothing
    """
    time_s = np.array([sample.time_s for sample in samples])
    requests = np.array([sample.requests for sample in samples])
    length_s, served = np.diff(time_s), np.diff(requests)
    known = (length_s > 0.0) & (length_s < LONGEST_GAP_S) & (served >= 0.0) & (served < LARGEST)
    return Counted(time_s[:-1][known], time_s[1:][known], served[known] / length_s[known])


def served_by(rows: Sequence[Row]) -> tuple[Array, Array]:
    """
    How many requests a client says it had got so far, at each start and end of its intervals.

    :param rows: in order of time
    :return: float[2 N], the moments [s]; float[2 N], the requests
    """
    times_s = np.array([(row.start_s, row.end_s) for row in rows]).ravel()
    times_s = np.maximum.accumulate(times_s)
    rates = np.array([(0.0, row.qps) for row in rows]).ravel()
    return times_s, np.cumsum(rates * np.diff(times_s, prepend=times_s[0]))


@dataclass(frozen=True)
class _Fit:
    """
    The shift that suits rows best.

    :param rows: as the client's clock has them
    :param shift_s: by how much they are late, to a step of the coarse search
    :param gain: of that shift; see `_gains`
    :param rival: the best gain of all shifts that are an interval or more away
    """

    rows: list[Row]
    shift_s: float
    gain: float
    rival: float


def _asked_qps(served: tuple[Array, Array], counted: Counted, shifts_s: Array) -> Array:
    """
    What the client says of the stretches between samples.

    :param served: as `served_by` has it
    :param shifts_s: float[S], by how much its rows are late
    :return: float[S, N], requests per second; NaN where its rows do not reach
    """
    limits_s = np.stack([counted.start_s, counted.end_s])[:, None] - shifts_s[:, None]
    sums = np.interp(limits_s, *served, left=math.nan, right=math.nan)
    rates: Array = (sums[1] - sums[0]) / (counted.end_s - counted.start_s)
    return rates


def _correlations(asked_qps: Array, counted: Counted, weights: Array) -> Array:
    """
    How well the two loads agree, over the stretches where both are known.

    :param asked_qps: float[S, N]
    :param weights: float[N], of the stretches
    :return: float[S], 0 where there is nothing to compare
    """
    known = np.isfinite(asked_qps)
    weight = np.where(known, weights, 0.0)
    weight /= np.maximum(weight.sum(1, keepdims=True), 1e-12)
    asked = np.where(known, asked_qps, 0.0)
    asked = asked - (weight * asked).sum(1, keepdims=True)
    counts = counted.qps - (weight * counted.qps).sum(1, keepdims=True)
    both = (weight * asked * counts).sum(1)
    size = (weight * asked**2).sum(1) * (weight * counts**2).sum(1)
    return np.divide(both, np.sqrt(size), out=np.zeros(len(size)), where=size > 1e-9)


def _gains(rows: Sequence[Row], counted: Counted, shifts_s: Array) -> Array:
    """
    Twice the logarithm of how much likelier the counts are with the client's load than without it.

    An interval counts as one observation, however often it was counted in.

    :param shifts_s: float[S], by how much its rows are late
    :return: float[S]
    """
    lengths_s, served = counted.end_s - counted.start_s, served_by(rows)
    gains = np.zeros(len(shifts_s))
    for index in range(len(shifts_s)):  # one by one: a day has a hundred thousand samples
        asked_qps = _asked_qps(served, counted, shifts_s[index : index + 1])
        (found,) = np.clip(_correlations(asked_qps, counted, lengths_s), 0.0, 1.0 - 1e-9)
        watched = lengths_s[np.isfinite(asked_qps[0])].sum() / _interval_s(rows)
        gains[index] = -max(0.0, watched - 2.0) * math.log(1.0 - found**2)
    return gains


def _fit(rows: list[Row], counted: Counted) -> _Fit:
    """The shift with which the loads agree best, and the best one an interval or more away."""
    step_s = min(0.25, _interval_s(rows) / 8.0)
    shifts_s = np.arange(-MOST_SHIFT_S, MOST_SHIFT_S + step_s, step_s)
    gains = _gains(rows, counted, shifts_s)
    best_s = shifts_s[np.argmax(gains)]
    away = np.abs(shifts_s - best_s) > _interval_s(rows) - step_s
    rival_s = shifts_s[np.argmax(np.where(away, gains, -1.0))]
    gain, rival = (
        _gains(rows, counted, _around(shift_s, step_s)).max() for shift_s in (best_s, rival_s)
    )
    return _Fit(rows, float(best_s), float(gain), float(rival))


def _around(shift_s: float, reach_s: float) -> Array:
    return shift_s + np.arange(-reach_s, reach_s + FINEST_S, FINEST_S)


def _interval_s(rows: Sequence[Row]) -> float:
    return max(FINEST_S, float(np.median([row.end_s - row.start_s for row in rows])))


def _refined(fit: _Fit, counted: Counted) -> Shift:
    """
    The shift to `FINEST_S`.

    The margin is twice the jackknife's standard error (Efron & Stein, 1981), and at least two steps
    of the search. One of at most `PARTS` stretches of whole intervals is left out after another.
    """
    interval_s = _interval_s(fit.rows)
    shifts_s = _around(fit.shift_s, min(0.25, interval_s / 8.0))
    asked_qps = _asked_qps(served_by(fit.rows), counted, shifts_s)
    weights = np.where(np.isfinite(asked_qps).all(0), counted.end_s - counted.start_s, 0.0)
    found = _correlations(asked_qps, counted, weights)
    best = int(np.argmax(found))
    interval = np.floor((counted.start_s - fit.shift_s - fit.rows[0].start_s) / interval_s)
    watched = np.unique(interval[weights > 0.0])
    block = np.searchsorted(watched, interval) * PARTS // max(PARTS, len(watched))
    without = [
        shifts_s[np.argmax(_correlations(asked_qps, counted, np.where(block == one, 0.0, weights)))]
        for one in np.unique(block[weights > 0.0])
    ]
    error_s = math.sqrt(max(1, len(without) - 1)) * float(np.std(without))
    shift_s = float(shifts_s[best])
    rows = [
        replace(row, start_s=row.start_s + shift_s, end_s=row.end_s + shift_s) for row in fit.rows
    ]
    return Shift(rows, shift_s, max(2.0 * error_s, 2.0 * FINEST_S), float(found[best]))
