"""
Predicted against measured: what the scenario's profile makes of a run that is over.

The simulator needs its compiler, which the live side does without. So a process of its own
(`training.refinement.predict_run`) plays the run twice and leaves its figures in `PREDICTION_FILE`.
Where that fails, the report says why and does without them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from deploy.linux.helpers import helper_command
from deploy.linux.own_folder import write_own
from deploy.records.recorder import POLICY_FILE, PREDICTION_FILE
from env.errors import InputError, fault, validation_message
from env.inputs.text_files import MOST_RECORD_BYTES, read_bytes, read_json

PREDICT_LIMIT_S = 120.0
"""Two seconds are usual; after an update the simulator is compiled anew, which takes 20."""

CANNOT = "nothing is predicted"


class _PredictedPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PolicySource(_PredictedPart):
    """
    Who decided, so that the same one can be asked again; what `POLICY_FILE` holds.

    :param source: a shipped rule's name, or the path of a checkpoint or a rule's parameters
    :param digest: SHA-256 of that file; empty for a name
    """

    source: str
    digest: str

    @property
    def unchanged(self) -> bool:
        """Whether the file is still what it was."""
        return not self.digest or self.digest == _digest(Path(self.source))


class Figures(_PredictedPart):
    """
    What a run comes to, measured or simulated; None where that is not known.

    :param makespan_s: from the first job's start to the last one's end [s]
    :param violation_ratio: share of the intervals with p95 above the SLO
    :param intervals: how many of them have a p95; a mean may be a fraction
    :param p95_median_us: median of the intervals' p95 [µs]
    :param p95_high_us: 95th percentile of the intervals' p95 [µs]
    :param shared_p95_us: median p95 of the intervals in which jobs ran on memcached's vCPUs for
        most of the time [µs]: what sharing costs, held against the next
    :param apart_p95_us: the same of the other intervals [µs]
    :param changes_per_min: changes made, per minute of the makespan
    :param guard_steps: levels that the SLO guard climbed
    :param jobs: from each job's first start to its end, pauses included [s]
    """

    makespan_s: float | None
    violation_ratio: float | None
    intervals: float
    p95_median_us: float | None
    p95_high_us: float | None
    shared_p95_us: float | None
    apart_p95_us: float | None
    changes_per_min: float | None
    guard_steps: float | None
    jobs: dict[str, float | None]


class Prediction(_PredictedPart):
    """
    What `PREDICTION_FILE` holds.

    :param profile: whose parameters were used
    :param measured: of the run itself
    :param replayed: under the load that was there and the decisions that were taken; None where
        they cannot be played
    :param free: with the policy free to decide, under the same load; None where it cannot be asked
    :param remarks: what could not be done and why, a line each
    """

    profile: str
    measured: Figures | None
    replayed: Figures | None
    free: Figures | None
    remarks: list[str]


def note_policy(folder: Path, source: str) -> None:
    """
    Write down who decides.

    :param folder: of the run's records
    :param source: what `agents.make` took
    :raises OSError: if the disk refuses it
    """
    path = Path(source)
    known = (
        PolicySource(source=str(path.resolve()), digest=_digest(path))
        if path.suffix and path.is_file()
        else PolicySource(source=source, digest="")
    )
    write_own(folder / POLICY_FILE, known.model_dump_json(indent=2) + "\n")


def read_policy(folder: Path) -> PolicySource:
    """
    Who decided in a run.

    :param folder: of its records
    :raises InputError: if that is not written there
    """
    return _read(folder / POLICY_FILE, "a run's policy", PolicySource)


def write_prediction(folder: Path, prediction: Prediction) -> None:
    """
    Write `PREDICTION_FILE`.

    :param folder: of the run's records
    :param prediction: what it is to hold
    :raises OSError: if the disk refuses it
    """
    write_own(folder / PREDICTION_FILE, prediction.model_dump_json(indent=2) + "\n")


def read_prediction(folder: Path) -> Prediction | None:
    """
    What was predicted of a run; None where that was not tried.

    :param folder: of its records
    :raises InputError: if the file is not what `write_prediction` writes
    """
    path = folder / PREDICTION_FILE
    return _read(path, "a run's prediction", Prediction) if path.exists() else None


def predict(folder: Path) -> Prediction:
    """
    Have a run played in the simulator, by a process of its own and within `PREDICT_LIMIT_S`.

    :param folder: of its records, `report.json` among them
    :return: the prediction, without figures where it failed
    :raises OSError: if the disk refuses it
    """
    said = f"{CANNOT}: what training needs is not installed"
    if importlib.util.find_spec("numba") is not None:
        command = helper_command("training.refinement.predict_run", str(folder.resolve()))
        try:
            subprocess.run(
                command, check=True, timeout=PREDICT_LIMIT_S, capture_output=True, text=True
            )
            prediction = read_prediction(folder)
            if prediction is not None:
                return prediction
        except subprocess.TimeoutExpired:
            said = f"{CANNOT}: the simulator took more than {PREDICT_LIMIT_S:g} s"
        except (subprocess.SubprocessError, OSError, InputError) as error:
            said = f"{CANNOT}: {fault(error).removeprefix('coretide: ')}"
    failed = Prediction(profile="", measured=None, replayed=None, free=None, remarks=[said])
    write_prediction(folder, failed)
    return failed


def in_short(prediction: Prediction) -> dict[str, Any] | None:
    """
    What `report.json` says of it: the run that the policy was expected to make of this load.

    :param prediction: see there
    """
    names = {"makespan_s", "violation_ratio", "changes_per_min", "jobs"}
    return None if prediction.free is None else prediction.free.model_dump(include=names)


def rows_of(prediction: Prediction, slo_us: float) -> list[tuple[str, ...]]:
    """
    The table: a heading, then a row for each figure; none where nothing was predicted.

    :param prediction: see there
    :param slo_us: the SLO [µs]
    """
    if prediction.replayed is None and prediction.free is None:
        return []
    columns = {
        "measured": prediction.measured,
        "same decisions": prediction.replayed,
        "policy free": prediction.free,
    }
    return table_of(columns, slo_us)


def table_of(columns: Mapping[str, Figures | None], slo_us: float) -> list[tuple[str, ...]]:
    """
    Figures side by side: a heading, then a row for each.

    :param columns: by their headings
    :param slo_us: the SLO [µs]
    """
    figures = [
        ("makespan, s", "makespan_s", 1.0, ".1f"),
        (f"intervals with p95 above {slo_us:g} µs, %", "violation_ratio", 100.0, ".1f"),
        ("p95 of the intervals, median, µs", "p95_median_us", 1.0, ".0f"),
        ("p95 of the intervals, 95th percentile, µs", "p95_high_us", 1.0, ".0f"),
        ("median p95 while jobs share memcached's vCPUs, µs", "shared_p95_us", 1.0, ".0f"),
        ("median p95 while none does, µs", "apart_p95_us", 1.0, ".0f"),
        ("changes a minute", "changes_per_min", 1.0, ".1f"),
        ("steps of the SLO guard", "guard_steps", 1.0, ".0f"),
    ]
    rows: list[tuple[str, ...]] = [("", *columns)]
    for what, name, scale, form in figures:
        values = [None if one is None else getattr(one, name) for one in columns.values()]
        rows.append((what, *(_shown(value, scale, form) for value in values)))
    for name in dict.fromkeys(name for one in columns.values() if one for name in one.jobs):
        values = [None if one is None else one.jobs.get(name) for one in columns.values()]
        rows.append((f"{name}, s", *(_shown(value, 1.0, ".1f") for value in values)))
    return rows


def lines_of(prediction: Prediction, slo_us: float) -> list[str]:
    """
    The table for a terminal, and what could not be done.

    :param prediction: see there
    :param slo_us: the SLO [µs]
    """
    rows = rows_of(prediction, slo_us)
    title = [f"predicted by profile {prediction.profile} against measured:"] if rows else []
    return [*title, *aligned(rows), *prediction.remarks]


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """
    A table as lines, its first column to the left and the others to the right.

    :param rows: all of one length
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join((first.ljust(widths[0]), *(map(str.rjust, others, widths[1:]))))
        for first, *others in rows
    ]


def _shown(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else f"{scale * value:{form}}"


def _digest(path: Path) -> str:
    """Empty where there is no such file, or none that a policy can be in."""
    try:
        return hashlib.sha256(read_bytes(path, "a policy", MOST_RECORD_BYTES)).hexdigest()
    except InputError:
        return ""


def _read(path: Path, what: str, form: Any) -> Any:
    content = read_json(path, what)
    try:
        return form.model_validate(content)
    except ValidationError as error:
        raise InputError(validation_message(path, error)) from error
