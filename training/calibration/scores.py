"""Measured and simulated figures of replayed runs, and how far they are apart."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import mannwhitneyu

from training.calibration.logs.traces import RunTrace
from training.calibration.replay import FloatArray, Replay


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
        self.violated: list[bool] = []
        self.simulated_us: list[float] = []
        self.per_run: list[dict[str, Any]] = []
        self.groups: dict[str, dict[str, int]] = {}

    def add(self, run: RunTrace, opened: Replay, closed: Replay) -> None:
        """
        Count one run in.

        :param run: what was measured
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
        window = (run.interval_end_s > run.first_start_s) & (run.interval_start_s < run.last_end_s)
        hit = window & (run.p95_us > self.slo_us)
        predicted = window & (opened.p95_us > self.slo_us)
        group = self.groups.setdefault(run.group, {"runs": 0, "intervals": 0, "violations": 0})
        group["runs"] += 1
        if run.moves_logged:
            calm = window & ~hit
            self.p95 += np.abs(opened.p95_us[calm] / run.p95_us[calm] - 1.0).tolist()
            self.violated += hit[window].tolist()
            self.simulated_us += opened.p95_us[window].tolist()
            group["intervals"] += int(window.sum())
            group["violations"] += int(hit.sum())
        self.per_run.append(
            {
                "run": run.run,
                "makespan_measured_s": round(run.makespan_s, 2),
                "makespan_simulated_s": round(makespan, 2),
                "violations_measured": int(hit.sum()),
                "violations_simulated": int(predicted.sum()),
                "moves_logged": run.moves_logged,
            }
        )

    def report(self, profile: str) -> dict[str, Any]:
        """
        All figures, ready for JSON; `None` where nothing could be compared.

        :param profile: name of the profile that was judged
        """
        violated = np.array(self.violated, dtype=bool)
        simulated_us = np.array(self.simulated_us)
        alarmed = simulated_us > self.slo_us
        recall = _share(alarmed[violated])
        kept = _share(~alarmed[~violated])
        balanced = None if recall is None or kept is None else (recall + kept) / 2.0
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
                "precision": _share(violated[alarmed]),
                "recall": recall,
                "balanced_accuracy": balanced,
                "auc": _auc(simulated_us, violated),
                "measured": int(violated.sum()),
                "simulated": int(alarmed.sum()),
            },
            "groups": self.groups,
            "per_run": self.per_run,
        }


def _share(flags: npt.NDArray[np.bool_]) -> float | None:
    """Share of the flags that are set; None of none."""
    return round(float(flags.mean()), 4) if len(flags) else None


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
