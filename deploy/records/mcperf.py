"""
mcperf's output: one `read` row per measurement interval, latencies in microseconds.

Our own load prints the same columns, so that either can feed a run, and one more: `client_late`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

PERCENTILES = {
    "p5": 5.0,
    "p10": 10.0,
    "p50": 50.0,
    "p67": 67.0,
    "p75": 75.0,
    "p80": 80.0,
    "p85": 85.0,
    "p90": 90.0,
    "p95": 95.0,
    "p99": 99.0,
    "p999": 99.9,
    "p9999": 99.99,
}
CLIENT_LATE = "client_late"
COLUMNS = ("avg", "std", "min", *PERCENTILES, "QPS", "target", "ts_start", "ts_end", CLIENT_LATE)
HEADER = " ".join(("#type", *COLUMNS))

LARGEST = 1e15
"""Above any number in the output: time stamps are milliseconds of the epoch."""

SPOILED = 0.01
"""Share of an interval's requests or of its CPU time beyond which its p95 is not memcached's doing
alone: p95 leaves five in a hundred to chance, and this is a fifth of them."""


@dataclass(frozen=True)
class Row:
    """
    One measurement interval.

    :param p95_us: 95th percentile of the latency [µs]
    :param qps: requests answered per second
    :param target_qps: requests asked for per second; NaN where it is not known
    :param start_s: when the interval started [s of the epoch]; NaN where the output does not say
    :param end_s: when the interval ended [s of the epoch]
    :param client_late: share of what the client was to do that it did late, by no fault of
        memcached's; NaN where that was not measured
    :param stolen: share of the scenario's vCPUs' time that the hypervisor gave to others; NaN where
        that was not measured
    :param quantiles: shares of the requests, rising, and the latency that each share does not
        exceed [µs]; empty where only p95 is known
    """

    p95_us: float
    qps: float
    target_qps: float
    start_s: float = math.nan
    end_s: float = math.nan
    client_late: float = math.nan
    stolen: float = math.nan
    quantiles: tuple[tuple[float, float], ...] = ()

    @property
    def spoiled(self) -> bool:
        """Whether the client's own delays or stolen time have a part in its latency."""
        return self.client_late > SPOILED or self.stolen > SPOILED


def format_row(
    latencies_us: Sequence[float] | npt.NDArray[np.float64],
    qps: float,
    target_qps: float,
    start_s: float,
    end_s: float,
    client_late: float,
    operation: str = "read",
) -> str:
    """
    A row of one operation.

    :param latencies_us: every measured latency of the interval [µs]
    :param qps: requests answered per second
    :param target_qps: requests asked for per second; NaN if that is not known
    :param start_s: when the interval started [s of the epoch]
    :param end_s: when the interval ended [s of the epoch]
    :param client_late: see `Row`
    :param operation: `read` or `update`; all that reads rows goes by the first
    """
    ordered = np.sort(np.asarray(latencies_us if len(latencies_us) else [0.0]))
    values = [ordered.mean(), ordered.std(), ordered[0]]
    values += [percentile(ordered, rank) for rank in PERCENTILES.values()]
    words = [f"{value:.1f}" for value in (*values, qps)]
    stamps = [str(round(1000 * moment)) for moment in (start_s, end_s)]
    return " ".join((operation, *words, f"{target_qps:.0f}", *stamps, f"{client_late:.4f}"))


def percentile(ordered: Sequence[float] | npt.NDArray[np.float64], rank: float) -> float:
    """
    The smallest value that `rank` percent of the values do not exceed.

    :param ordered: values in rising order, at least one
    :param rank: 0 to 100
    """
    return float(ordered[max(0, math.ceil(len(ordered) * rank / 100.0) - 1)])


@dataclass(frozen=True)
class Output:
    """
    What a run of mcperf has printed.

    :param rows: in their order, with the times that they name themselves
    :param start_s: when the load started [s of the epoch]; NaN where that is not said
    :param end_s: when it had ended [s of the epoch]; NaN where that is not said
    :param announced: how many intervals were announced; None where that is not said
    :param whole: whether the last line that a dynamic run prints is there
    :param runs: how many headings there are: one a run
    """

    rows: list[Row]
    start_s: float
    end_s: float
    announced: int | None
    whole: bool
    runs: int

    @property
    def stamped(self) -> bool:
        """Whether the rows name their times themselves."""
        return bool(self.rows) and not any(math.isnan(row.start_s) for row in self.rows)

    def spread(self, length_s: float, start_s: float) -> list[Row]:
        """
        The rows one after another.

        :param length_s: of each interval [s]
        :param start_s: of the first [s]
        """
        return [
            replace(row, start_s=start_s + i * length_s, end_s=start_s + (i + 1) * length_s)
            for i, row in enumerate(self.rows)
        ]


def read_output(lines: Iterable[str], refuse: Callable[[int], None] | None = None) -> Output:
    """
    Mcperf's output, of a dynamic run or of a scan.

    :param lines: the output so far; what is no complete row of sensible numbers is left out
    :param refuse: is told the number of each line that is left out, from 1 on
    """
    columns: Sequence[str] = ()
    limits_s: dict[str, float] = {}
    rows, announced, whole, runs = list[Row](), None, False, 0
    for number, line in enumerate(lines, 1):
        words = line.split()
        try:
            if words[:1] == ["#type"]:
                columns, runs = words[1:], runs + 1
            elif words[:1] == ["Timestamp"] and len(words) == 3:
                limits_s[words[1]] = _finite(words[2]) / 1e3
            elif words[:5] == ["Total", "number", "of", "intervals", "="]:
                announced = int(words[5])
            elif words[:3] == ["Total", "QPS", "="]:
                whole = True
            elif words[:1] == ["read"]:
                rows.append(_row(dict(zip(columns, words[1:], strict=True))))
        except (IndexError, KeyError, ValueError):
            if refuse is not None:
                refuse(number)
    start_s, end_s = limits_s.get("start:", math.nan), limits_s.get("end:", math.nan)
    return Output(rows, start_s, end_s, announced, whole, runs)


def read_rows(lines: Iterable[str], refuse: Callable[[int], None] | None = None) -> list[Row]:
    """
    The rows of mcperf's output, of a dynamic run or of a scan.

    A dynamic run of mcperf says when it started and ended, and prints its rows, of equal length,
    in between: where a row has no times of its own, they follow from that.

    :param lines: the output so far; what is no complete row of sensible numbers is left out
    :param refuse: is told the number of each line that is left out, from 1 on
    """
    output = read_output(lines, refuse)
    if not output.rows or output.stamped or math.isnan(output.end_s - output.start_s):
        return output.rows
    length_s = max(0.0, output.end_s - output.start_s) / len(output.rows)
    return output.spread(length_s, output.start_s)


def _row(words: dict[str, str]) -> Row:
    """A row of numbers that can be measured; its times are both there or both missing."""
    stamps = [_finite(words[name]) / 1e3 for name in ("ts_start", "ts_end") if name in words]
    start_s, end_s = stamps or (math.nan, math.nan)
    if end_s < start_s:
        raise ValueError(f"ends at {end_s} before its start")
    target_qps = math.nan if words["target"] == "nan" else _finite(words["target"])
    late = _finite(words[CLIENT_LATE]) if CLIENT_LATE in words else math.nan
    ranks = [("min", 0.0), *PERCENTILES.items()]
    quantiles = [(rank / 100.0, _finite(words[name])) for name, rank in ranks if name in words]
    p95_us, qps = _finite(words["p95"]), _finite(words["QPS"])
    return Row(
        p95_us, qps, target_qps, start_s, end_s, client_late=late, quantiles=tuple(quantiles)
    )


def _finite(word: str) -> float:
    value = float(word)
    if not 0.0 <= value <= LARGEST:
        raise ValueError(f"{word} is nothing that can be measured")
    return value
