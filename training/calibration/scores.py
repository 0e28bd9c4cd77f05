"""Measured and simulated figures of replayed runs, and how far they are apart."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import mannwhitneyu

from env.simulator.profile import Scatter
from training.calibration.logs.known_faults import known_faults
from training.calibration.logs.traces import JobTrace, RunTrace
from training.calibration.replay import FloatArray, Replay
from training.violations import drawn_violations, fit_scatter, violation_probability

CURVE = (0.0, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0)
"""Limits of the probabilities that one point of the calibration curve stands for."""

LOADS_QPS = (0.0, 40e3, 80e3, 120e3, math.inf)
"""Limits of the loads whose intervals are scored together [requests/s]."""

LIKE_MEANS = 200
"""Repeated intervals of like mean p95 whose scatter is taken for one."""

LIKELY = 0.03
"""
An interval is held to violate where that is more probable: about the share of all that do.

The balanced accuracy weighs both kinds of interval alike, so this is the verdict that it asks for
(Bayes: a likelihood ratio above 1)."""

LEAST_PROBABILITY = 1e-6
"""No violation is held for less probable, nor for more certain than 1 minus this."""


class JobRow(NamedTuple):
    """
    One job of one run: how long it ran, without pauses.

    :param job: the job's name
    :param kind: its threads against the vCPUs that it had, see `thread_kind`
    :param measured_s: what the log says [s]
    :param open_s: what the open replay says [s]
    """

    job: str
    kind: str
    measured_s: float
    open_s: float


class RunIntervals(NamedTuple):
    """
    Intervals of one run within its batch window; memcached's moves are known.

    :param run: the run's name
    :param group: the group whose log it is from
    :param qps: float64[n], load [requests/s]
    :param measured_us: float64[n], measured p95 [us]
    :param simulated_us: float64[n], simulated p95 [us]
    :param drawn_us: float64[draws, n], the same where VM and lag are drawn [us]
    """

    run: str
    group: str
    qps: FloatArray
    measured_us: FloatArray
    simulated_us: FloatArray
    drawn_us: FloatArray

    def at(self, rows: npt.NDArray[np.bool_]) -> "RunIntervals":
        """
        Some of the intervals.

        :param rows: bool[n], which ones
        """
        return RunIntervals(
            self.run,
            self.group,
            self.qps[rows],
            self.measured_us[rows],
            self.simulated_us[rows],
            self.drawn_us[:, rows],
        )


def intervals_of(run: RunTrace, opened: Replay, drawn_us: FloatArray) -> RunIntervals:
    """
    What is compared of a run: the intervals that overlap its batch window.

    :param run: what was measured
    :param opened: its open replay
    :param drawn_us: float64[draws, n_intervals], p95 of replays of what the run may have been [us]
    """
    window = run.in_batch_window
    every = RunIntervals(run.run, run.group, run.qps, run.p95_us, opened.p95_us, drawn_us)
    return every.at(window)


def _at_loads(runs: Sequence[RunIntervals], low: float, high: float) -> list[RunIntervals]:
    """The intervals of a range of loads [requests/s], of the runs that have some."""
    parts = [run.at((run.qps >= low) & (run.qps < high)) for run in runs]
    return [part for part in parts if len(part.qps)]


def _vcpus(job: JobTrace) -> int:
    """How many vCPUs a job had for most of its time."""
    spent: dict[int, float] = {}
    ends_s = [moved_s for moved_s, _ in job.moves[1:]] + [job.end_s]
    for (moved_s, cores), end_s in zip(job.moves, ends_s, strict=True):
        spent[cores.bit_count()] = spent.get(cores.bit_count(), 0.0) + end_s - moved_s
    return max(spent, key=lambda count: spent[count])


def thread_kind(job: JobTrace) -> str:
    """
    A job's threads against the vCPUs that it had for most of its time.

    :param job: of a logged run
    """
    vcpus = _vcpus(job)
    if job.threads > vcpus:
        return "several threads on one vCPU" if vcpus == 1 else "more threads than vCPUs"
    return "fewer threads than vCPUs" if job.threads < vcpus else "a thread for each vCPU"


def scatter_around(runs: Sequence[RunIntervals], slo_us: float) -> Scatter | None:
    """
    How measured p95 scatter around simulated ones; None where no violations tell it.

    :param runs: intervals of runs whose memcached moves are logged
    :param slo_us: the latency objective [us]
    """
    if not runs:
        return None
    # Intervals of one group repeat one controller on few VMs: they are not independent.
    size = {run.group: 0 for run in runs}
    for run in runs:
        size[run.group] += len(run.measured_us)
    weights = [
        np.full(len(run.measured_us), size[run.group] ** -0.5) for run in runs if size[run.group]
    ]
    return fit_scatter(
        np.concatenate([run.drawn_us for run in runs], axis=1),
        np.concatenate([run.measured_us for run in runs]),
        slo_us,
        np.concatenate(weights),
    )


class Tally:
    """
    Measured and simulated figures of all runs, and their errors.

    :param slo_us: the latency objective of their year [us]
    """

    def __init__(self, slo_us: float) -> None:
        self.slo_us = slo_us
        self.open_jobs: list[float] = []
        self.closed_jobs: list[float] = []
        self.job_rows: list[JobRow] = []
        self.makespans: list[float] = []
        self.p95: list[float] = []
        self.intervals: list[RunIntervals] = []
        self.per_run: list[dict[str, Any]] = []
        self.groups: dict[str, dict[str, int]] = {}
        self.runs: list[RunTrace] = []

    def add(self, run: RunTrace, compared: RunIntervals, opened: Replay, closed: Replay) -> None:
        """
        Count one run in.

        :param run: what was measured
        :param compared: its intervals
        :param opened: its open replay
        :param closed: its closed replay
        """
        self.runs.append(run)
        measured = np.array([job.run_s for job in run.jobs])
        self.open_jobs += (np.abs(opened.run_s / measured - 1.0)).tolist()
        self.closed_jobs += (np.abs(closed.run_s / measured - 1.0)).tolist()
        for job, seconds, simulated in zip(run.jobs, measured, opened.run_s, strict=True):
            row = JobRow(job.name, thread_kind(job), float(seconds), float(simulated))
            self.job_rows.append(row)
        makespan = float(closed.end_s.max() - run.first_start_s)
        self.makespans.append(abs(makespan / run.makespan_s - 1.0))
        hit = compared.measured_us > self.slo_us
        group = self.groups.setdefault(run.group, {"runs": 0, "intervals": 0, "violations": 0})
        group["runs"] += 1
        if run.moves_logged:
            self.intervals.append(compared)
            error = np.abs(compared.simulated_us / compared.measured_us - 1.0)
            self.p95 += error[~hit].tolist()
            group["intervals"] += len(hit)
            group["violations"] += int(hit.sum())
        self.per_run.append(
            {
                "run": run.run,
                "makespan_measured_s": round(run.makespan_s, 2),
                "makespan_simulated_s": round(makespan, 2),
                "violations_measured": int(hit.sum()),
                "violations_simulated": int((compared.simulated_us > self.slo_us).sum()),
                "moves_logged": run.moves_logged,
            }
        )

    def report(self, profile: str, scatters: Mapping[str, Scatter]) -> dict[str, Any]:
        """
        All figures, ready for JSON; `None` where nothing could be compared.

        :param profile: name of the profile that was judged
        :param scatters: of measured p95 around simulated ones, for each group that has one
        """
        return {
            "profile": profile,
            "runs": len(self.per_run),
            "job_duration": {
                "median_abs_rel_error": _quantile(self.open_jobs, 0.5),
                "p90_abs_rel_error": _quantile(self.open_jobs, 0.9),
                "closed_median_abs_rel_error": _quantile(self.closed_jobs, 0.5),
                "closed_p90_abs_rel_error": _quantile(self.closed_jobs, 0.9),
                "kinds": {
                    kind: self._job_errors(kind)
                    for kind in sorted({row.kind for row in self.job_rows})
                },
            },
            "makespan": {"median_abs_rel_error": _quantile(self.makespans, 0.5)},
            "p95": {"median_abs_rel_error": _quantile(self.p95, 0.5), "intervals": len(self.p95)},
            "violations": {
                **self._verdicts(),
                **self._probabilities(self.intervals, scatters),
                "groups": {
                    group: self._probabilities(
                        [run for run in self.intervals if run.group == group], scatters
                    )
                    for group in dict.fromkeys(run.group for run in self.intervals)
                },
                "without_suspicious": self._probabilities(
                    [run for run in self.intervals if run.run not in known_faults().suspicious],
                    scatters,
                ),
                "auc_missing": self._missing(scatters),
                "loads": [
                    {"from_qps": low, "to_qps": high if high < math.inf else None}
                    | self._probabilities(_at_loads(self.intervals, low, high), scatters)
                    for low, high in pairwise(LOADS_QPS)
                ],
            },
            "repetition": repetition(self.runs, self.slo_us),
            "groups": self.groups,
            "per_run": self.per_run,
        }

    def _job_errors(self, kind: str) -> dict[str, Any]:
        """Errors of the jobs of one kind, in the open replay."""
        rows = [row for row in self.job_rows if row.kind == kind]
        errors = [row.open_s / row.measured_s - 1.0 for row in rows]
        return {
            "jobs": len(rows),
            "median_rel_error": _quantile(errors, 0.5),
            "median_abs_rel_error": _quantile(np.abs(errors).tolist(), 0.5),
            "p90_abs_rel_error": _quantile(np.abs(errors).tolist(), 0.9),
        }

    def _verdicts(self) -> dict[str, Any]:
        """Scores of the verdict that an interval violates where its simulated p95 does."""
        simulated_us, violated = _joined(self.intervals, self.slo_us)
        alarmed = simulated_us > self.slo_us
        return {
            "precision": _share(violated[alarmed]),
            "recall": _share(alarmed[violated]),
            "balanced_accuracy_p95": _balanced_accuracy(alarmed, violated),
            "simulated": int(alarmed.sum()),
        }

    def _missing(self, scatters: Mapping[str, Scatter]) -> dict[str, dict[str, float]] | None:
        """Which violations bear what the AUC lacks to 1; None where nobody knows."""
        _, violated = _joined(self.intervals, self.slo_us)
        if not violated.any() or any(run.group not in scatters for run in self.intervals):
            return None
        lengths = [len(run.measured_us) for run in self.intervals]
        chances = [self._chances(run, scatters) for run in self.intervals]
        measured_us = np.concatenate([run.measured_us for run in self.intervals])
        groups = np.repeat([run.group for run in self.intervals], lengths)
        runs = np.repeat([run.run for run in self.intervals], lengths)
        parts = {group: groups == group for group in dict.fromkeys(groups.tolist())}
        parts["suspicious runs"] = np.isin(runs, list(known_faults().suspicious))
        parts["above the SLO by less than 10 %"] = measured_us < 1.1 * self.slo_us
        return missing_shares(np.concatenate(chances), violated, parts)

    def _chances(self, run: RunIntervals, scatters: Mapping[str, Scatter]) -> FloatArray:
        """How probable it is that each interval of a run violates."""
        return violation_probability(run.drawn_us, self.slo_us, scatters[run.group])

    def _probabilities(
        self, runs: Sequence[RunIntervals], scatters: Mapping[str, Scatter]
    ) -> dict[str, Any]:
        """Scores of the probability that an interval violates."""
        simulated_us, violated = _joined(runs, self.slo_us)
        scores = {
            "intervals": len(violated),
            "measured": int(violated.sum()),
            "auc": _auc(simulated_us, violated),
            **dict.fromkeys(
                ("auc_if_right", "expected", "log_loss", "brier", "runs_within_90", "curve")
            ),
            "balanced_accuracy": _balanced_accuracy(simulated_us > self.slo_us, violated),
        }
        if not runs or any(run.group not in scatters for run in runs):
            return scores
        probability = np.concatenate([self._chances(run, scatters) for run in runs])
        within = []
        for run in runs:
            drawn = drawn_violations(run.drawn_us, self.slo_us, scatters[run.group])
            low, high = np.quantile(drawn, (0.05, 0.95))
            within.append(low <= (run.measured_us > self.slo_us).sum() <= high)
        return scores | {
            "auc": _auc(probability, violated),
            "auc_if_right": auc_if_right(probability),
            "balanced_accuracy": _balanced_accuracy(probability > LIKELY, violated),
            "expected": round(float(probability.sum()), 1),
            "log_loss": round(_log_loss(probability, violated), 4),
            "brier": round(float(np.mean((probability - violated) ** 2)), 4),
            "runs_within_90": _share(np.array(within)),
            "curve": _curve(probability, violated),
        }


def repetition(runs: Sequence[RunTrace], slo_us: float) -> dict[str, Any]:
    """
    How well runs of one setting foretell each other: what no model of the machine can be asked for.

    A run is foretold by the mean of the other runs of its group, day and interval length: each job
    with as many threads, the makespan, and the p95 of the interval of the same number. Jobs are
    foretold by other days of the group, too: what stays open of a VM that is not known. Whoever
    knew the true means would miss less than the mean of a few runs does.

    How much more repetitions tell, the AUC of one and of two others says for intervals that have
    three. The AUC of means bounds it: that of a model that knows the mean of every interval, if p95
    scatter around it as repetitions do; means of a few runs hold some of the scatter themselves.

    :param runs: measured runs
    :param slo_us: the latency objective [us]
    """
    alike: dict[tuple[str, str, float], list[RunTrace]] = {}
    for run in runs:
        length_s = float(np.median(run.interval_end_s - run.interval_start_s))
        alike.setdefault((run.group, run.day, round(4.0 * length_s)), []).append(run)
    jobs: list[_Miss] = []
    makespans: list[_Miss] = []
    repeated: list[_Repeated] = []
    for setting in alike.values():
        for run in setting:
            others = [other for other in setting if other is not run]
            if others:
                makespans.append(_miss(run.makespan_s, [other.makespan_s for other in others]))
                jobs += _job_misses(run, others)
        repeated += _repeated([run for run in setting if run.moves_logged])
    told = _foretold(repeated, slo_us)
    groups = dict.fromkeys(interval.group for interval in repeated)
    return {
        "runs": len(makespans),
        "job_duration": _typical(jobs),
        "makespan": _typical(makespans),
        "job_duration_of_other_days": _typical(_other_days(runs)),
        "violations": told
        | {
            "groups": {
                g: _foretold([one for one in repeated if one.group == g], slo_us) for g in groups
            }
        },
    }


class _Miss(NamedTuple):
    """
    How far a figure of a run is from the mean of others.

    :param error: relative to the run's own
    :param of_mean: the same of the true mean, by how many others the mean is of
    """

    error: float
    of_mean: float


def _miss(own: float, others: Sequence[float]) -> _Miss:
    """How far the others' mean is from a run's own figure."""
    error = abs(float(np.mean(others)) / own - 1.0)
    # The mean of n scatters itself, with 1 / n of a run's variance, which adds to that of the run.
    return _Miss(error, error * math.sqrt(len(others) / (len(others) + 1)))


def _job_misses(run: RunTrace, others: Sequence[RunTrace]) -> list[_Miss]:
    """How far other runs' jobs with as many threads are from a run's."""
    misses = []
    for job in run.jobs:
        same = [
            twin.run_s
            for other in others
            for twin in other.jobs
            if (twin.name, twin.threads) == (job.name, job.threads)
        ]
        if same:
            misses.append(_miss(job.run_s, same))
    return misses


def _other_days(runs: Sequence[RunTrace]) -> list[_Miss]:
    """
    How far a group's jobs of other days, and so of other VMs, are from a day's.

    Jobs are alike that have as many threads and vCPUs; each day counts as its mean.
    """
    alike: dict[tuple[str, str, int, int], dict[str, list[float]]] = {}
    for run in runs:
        for job in run.jobs:
            days = alike.setdefault((run.group, job.name, job.threads, _vcpus(job)), {})
            days.setdefault(run.day, []).append(job.run_s)
    return [
        _miss(own, others)
        for days in alike.values()
        for day, seconds in days.items()
        if (others := [float(np.mean(s)) for other, s in days.items() if other != day])
        for own in seconds
    ]


def _typical(misses: Sequence[_Miss]) -> dict[str, float | None]:
    """What is missed by others' mean, and would be by somebody who knew the true mean."""
    errors, of_mean = [one.error for one in misses], [one.of_mean for one in misses]
    return {
        "median_abs_rel_error": _quantile(errors, 0.5),
        "p90_abs_rel_error": _quantile(errors, 0.9),
        "median_if_mean_known": _quantile(of_mean, 0.5),
        "p90_if_mean_known": _quantile(of_mean, 0.9),
    }


class _Repeated(NamedTuple):
    """An interval that several runs of a setting have, and its p95 in each: float64[runs] [us]."""

    group: str
    p95_us: FloatArray


def _repeated(setting: Sequence[RunTrace]) -> list[_Repeated]:
    """Intervals that two runs or more of a setting have in their batch windows."""
    seen: dict[int, list[float]] = {}
    for run in setting:
        for number in np.flatnonzero(run.in_batch_window):
            seen.setdefault(int(number), []).append(float(run.p95_us[number]))
    return [_Repeated(setting[0].group, np.array(p95)) for p95 in seen.values() if len(p95) > 1]


def _foretold(repeated: Sequence[_Repeated], slo_us: float) -> dict[str, Any]:
    """How well an interval's repetitions tell its violations, and how well its mean would."""
    others_us = [(p95.sum() - p95) / (len(p95) - 1) for _, p95 in repeated]
    violated = np.concatenate([np.zeros(0, np.bool_), *(p95 > slo_us for _, p95 in repeated)])
    middles = np.array([np.log(p95).mean() for _, p95 in repeated])
    # Deviations from a mean of n are too small by this factor.
    scatter = [
        (np.log(p95) - middle) * math.sqrt(len(p95) / (len(p95) - 1))
        for (_, p95), middle in zip(repeated, middles, strict=True)
    ]
    order = np.argsort(middles)
    probability = np.zeros(len(middles))
    for place, interval in enumerate(order):
        first = max(min(place - LIKE_MEANS // 2, len(order) - LIKE_MEANS), 0)
        like = np.concatenate([scatter[other] for other in order[first : first + LIKE_MEANS]])
        probability[interval] = np.mean(middles[interval] + like > math.log(slo_us))
    often = [p95 for _, p95 in repeated if len(p95) > 2]
    of_often = np.concatenate([np.zeros(0, np.bool_), *(p95 > slo_us for p95 in often)])
    one_us = np.concatenate([np.zeros(0), *(np.roll(p95, 1) for p95 in often)])
    next_us = np.concatenate([np.zeros(0), *(np.roll(p95, 2) for p95 in often)])
    return {
        "intervals": len(violated),
        "measured": int(violated.sum()),
        "auc": _auc(np.concatenate([np.zeros(0), *others_us]), violated),
        "auc_of_one_other": _auc(one_us, of_often),
        "auc_of_two_others": _auc((one_us + next_us) / 2.0, of_often),
        "auc_of_means": auc_if_right(probability),
    }


def _joined(
    runs: Sequence[RunIntervals], slo_us: float
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Simulated p95 [us] and measured violations of several runs' intervals."""
    return (
        np.concatenate([np.zeros(0), *(run.simulated_us for run in runs)]),
        np.concatenate([np.zeros(0, np.bool_), *(run.measured_us > slo_us for run in runs)]),
    )


def _log_loss(probability: FloatArray, violated: npt.NDArray[np.bool_]) -> float:
    """Mean of -ln(the probability that was given to what was measured)."""
    given = np.where(violated, probability, 1.0 - probability)
    return float(-np.log(np.clip(given, LEAST_PROBABILITY, 1.0 - LEAST_PROBABILITY)).mean())


def _curve(probability: FloatArray, violated: npt.NDArray[np.bool_]) -> list[dict[str, Any]]:
    """The calibration curve: how many intervals of like probability were measured to violate."""
    at = np.clip(np.digitize(probability, CURVE) - 1, 0, len(CURVE) - 2)
    return [
        {
            "from": CURVE[point],
            "to": CURVE[point + 1],
            "intervals": int((at == point).sum()),
            "expected": round(float(probability[at == point].sum()), 1),
            "measured": int(violated[at == point].sum()),
        }
        for point in range(len(CURVE) - 1)
    ]


def _share(flags: npt.NDArray[np.bool_]) -> float | None:
    """Share of the flags that are set; None of none."""
    return round(float(flags.mean()), 4) if len(flags) else None


def _balanced_accuracy(
    alarmed: npt.NDArray[np.bool_], violated: npt.NDArray[np.bool_]
) -> float | None:
    """Mean of the shares called rightly, of intervals that violate and of others."""
    recall, kept = _share(alarmed[violated]), _share(~alarmed[~violated])
    return None if recall is None or kept is None else (recall + kept) / 2.0


def _auc(simulated_us: FloatArray, violated: npt.NDArray[np.bool_]) -> float | None:
    """
    How often a violating interval has the higher simulated p95 of the two; None without both.

    The area under the ROC curve: whatever threshold one would put on the simulated p95.
    """
    if violated.all() or not violated.any():
        return None
    pairs = np.count_nonzero(violated) * np.count_nonzero(~violated)
    u, _ = mannwhitneyu(simulated_us[violated], simulated_us[~violated])
    return round(float(u / pairs), 4)


def auc_if_right(probability: FloatArray) -> float | None:
    """
    The AUC to be expected if each interval violates as probably as it is held to.

    None where violations, or other intervals, are not to be expected.

    :param probability: float64[n]
    """
    at, place = np.unique(probability, return_inverse=True)
    violating = np.bincount(place, probability, len(at))
    others = np.bincount(place, 1.0 - probability, len(at))
    pairs = violating.sum() * others.sum()
    if pairs <= 0.0:
        return None
    lower = np.cumsum(others) - others / 2.0  # equals count half
    return round(float(violating @ lower / pairs), 4)


def missing_shares(
    probability: FloatArray,
    violated: npt.NDArray[np.bool_],
    parts: Mapping[str, npt.NDArray[np.bool_]],
) -> dict[str, dict[str, float]] | None:
    """
    Which violations bear what the AUC lacks to 1, where another interval is held for likelier.

    :param probability: float64[n]
    :param violated: bool[n]
    :param parts: by name, bool[n]; they may overlap
    :return: by name, how many violations a part has and their share; None where nothing is lacking
    """
    others, own = np.sort(probability[~violated]), probability[violated]
    below = np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")
    wrong = len(others) - below / 2.0  # equals count half
    if not wrong.sum():
        return None
    return {
        name: {
            "measured": int(part[violated].sum()),
            "share": round(float(wrong[part[violated]].sum() / wrong.sum()), 4),
        }
        for name, part in parts.items()
    }


def _quantile(values: Sequence[float], level: float) -> float | None:
    """A quantile of the values; None of none."""
    return round(float(np.quantile(values, level)), 4) if values else None
