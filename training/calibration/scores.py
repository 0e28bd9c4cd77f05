"""Measured and simulated figures of replayed runs, and how far they are apart."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import mannwhitneyu

from env.simulator.profile import Scatter
from training.calibration.logs.traces import RunTrace
from training.calibration.replay import FloatArray, Replay
from training.violations import drawn_violations, fit_scatter, violation_probability

CURVE = (0.0, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0)
"""Limits of the probabilities that one point of the calibration curve stands for."""

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
    :param measured_s: what the log says [s]
    :param open_s: what the open replay says [s]
    """

    job: str
    measured_s: float
    open_s: float


class RunIntervals(NamedTuple):
    """
    Intervals of one run within its batch window; memcached's moves are known.

    :param group: the group whose log the run is from
    :param measured_us: float64[n], measured p95 [us]
    :param simulated_us: float64[n], simulated p95 [us]
    :param drawn_us: float64[draws, n], the same where VM and lag are drawn [us]
    """

    group: str
    measured_us: FloatArray
    simulated_us: FloatArray
    drawn_us: FloatArray


def intervals_of(run: RunTrace, opened: Replay, drawn_us: FloatArray) -> RunIntervals:
    """
    What is compared of a run: the intervals that overlap its batch window.

    :param run: what was measured
    :param opened: its open replay
    :param drawn_us: float64[draws, n_intervals], p95 of replays of what the run may have been [us]
    """
    window = (run.interval_end_s > run.first_start_s) & (run.interval_start_s < run.last_end_s)
    return RunIntervals(run.group, run.p95_us[window], opened.p95_us[window], drawn_us[:, window])


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

    def add(self, run: RunTrace, compared: RunIntervals, opened: Replay, closed: Replay) -> None:
        """
        Count one run in.

        :param run: what was measured
        :param compared: its intervals
        :param opened: its open replay
        :param closed: its closed replay
        """
        measured = np.array([job.run_s for job in run.jobs])
        self.open_jobs += (np.abs(opened.run_s / measured - 1.0)).tolist()
        self.closed_jobs += (np.abs(closed.run_s / measured - 1.0)).tolist()
        for job, seconds, simulated in zip(run.jobs, measured, opened.run_s, strict=True):
            self.job_rows.append(JobRow(job.name, float(seconds), float(simulated)))
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
            },
            "groups": self.groups,
            "per_run": self.per_run,
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

    def _probabilities(
        self, runs: Sequence[RunIntervals], scatters: Mapping[str, Scatter]
    ) -> dict[str, Any]:
        """Scores of the probability that an interval violates."""
        simulated_us, violated = _joined(runs, self.slo_us)
        scores = {
            "measured": int(violated.sum()),
            "auc": _auc(simulated_us, violated),
            **dict.fromkeys(("expected", "log_loss", "brier", "runs_within_90", "curve")),
            "balanced_accuracy": _balanced_accuracy(simulated_us > self.slo_us, violated),
        }
        if not runs or any(run.group not in scatters for run in runs):
            return scores
        probability = np.concatenate(
            [violation_probability(run.drawn_us, self.slo_us, scatters[run.group]) for run in runs]
        )
        within = []
        for run in runs:
            drawn = drawn_violations(run.drawn_us, self.slo_us, scatters[run.group])
            low, high = np.quantile(drawn, (0.05, 0.95))
            within.append(low <= (run.measured_us > self.slo_us).sum() <= high)
        return scores | {
            "auc": _auc(probability, violated),
            "balanced_accuracy": _balanced_accuracy(probability > LIKELY, violated),
            "expected": round(float(probability.sum()), 1),
            "log_loss": round(_log_loss(probability, violated), 4),
            "brier": round(float(np.mean((probability - violated) ** 2)), 4),
            "runs_within_90": _share(np.array(within)),
            "curve": _curve(probability, violated),
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


def _quantile(values: Sequence[float], level: float) -> float | None:
    """A quantile of the values; None of none."""
    return round(float(np.quantile(values, level)), 4) if values else None
