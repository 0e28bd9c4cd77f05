"""
What do the logged runs say of choices in the model of jobs? Behind a table in docs/calibration.md.

Every choice is fitted once without each group, whose jobs are then predicted on a VM of speed 1,
with memcached as the profile has it:

- `0-2 1-3`: as shipped, vCPUs 0 and 2 slow each other, and 1 and 3;
- `0-1 2-3`, `0-3 1-2`: the other pairs;
- `no pairs`: no vCPU slows another;
- `no straggling`: a job does not wait for its slowest thread;
- `a speed for each VM`: the fit gives each group a speed for every day, in place of one.

    python -m benchmarks.job_models --data DIR --profile cca-2024 --json choices.json
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_writable, write_json
from env.simulator.profile import load_profile
from training.calibration.fit_jobs import Scaling, duration_errors, fit_jobs, read_scaling
from training.calibration.job_states import Occupancy, build_states, fitted_occupancy
from training.calibration.logs.course import BATCH_SIBLINGS
from training.calibration.logs.run_logs import read_runs
from training.calibration.logs.traces import RunTrace
from training.calibration.priors import HOST_PRIORS, Prior
from training.calibration.scores import thread_kind

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """
    What the fit takes as given.

    :param sibling: int64[VCPUS], the vCPU that shares a core with each one, or -1
    :param host_priors: of the host's parameters
    :param by_vm: each VM has a speed of its own, not each group
    """

    sibling: npt.NDArray[np.int64]
    host_priors: Mapping[str, Prior]
    by_vm: bool = False


CHOICES = {
    "0-2 1-3": Choice(BATCH_SIBLINGS, HOST_PRIORS),
    "0-1 2-3": Choice(np.array([1, 0, 3, 2]), HOST_PRIORS),
    "0-3 1-2": Choice(np.array([3, 2, 1, 0]), HOST_PRIORS),
    "no pairs": Choice(np.full(4, -1), HOST_PRIORS),
    "no straggling": Choice(
        BATCH_SIBLINGS, {**HOST_PRIORS, "straggling": Prior(1e-3, 1e-3, 1e-4, 1.0)}
    ),
    "a speed for each VM": Choice(BATCH_SIBLINGS, HOST_PRIORS, by_vm=True),
}


def left_out_errors(
    choice: Choice, runs: Sequence[RunTrace], scaling: Scaling, occupancy: Occupancy
) -> tuple[FloatArray, list[str], list[str]]:
    """
    How far jobs are from what a fit without their group predicts.

    :param choice: what the fits take as given
    :param runs: of all groups
    :param scaling: run times alone, by thread count
    :param occupancy: how busy memcached is
    :return: signed relative errors and kind (`thread_kind`) of every job, and what ended on a bound
    """
    errors, kinds, bounds = [], [], []
    for group in dict.fromkeys(run.group for run in runs):
        own = [run for run in runs if run.group == group]
        others = [run for run in runs if run.group != group]
        if choice.by_vm:
            others = [replace(run, group=f"{run.group} {run.day}") for run in others]
        states = build_states(others, occupancy, choice.sibling)
        fit = fit_jobs(states, scaling, host_priors=choice.host_priors)
        bounds += list(fit.at_bound)
        errors.append(duration_errors(build_states(own, occupancy, choice.sibling), fit))
        kinds += [thread_kind(job) for run in own for job in run.jobs]
    return np.concatenate(errors), kinds, sorted(set(bounds))


def report(errors: FloatArray, kinds: Sequence[str], bounds: Sequence[str]) -> dict[str, Any]:
    """
    A choice's figures, ready for JSON.

    :param errors: signed relative errors
    :param kinds: of the same jobs
    :param bounds: parameters that ended on a bound in one of the fits
    """
    of_kind = {kind: errors[np.array(kinds) == kind] for kind in sorted(set(kinds))}
    return {
        "median_abs_rel_error": round(float(np.median(np.abs(errors))), 4),
        "p90_abs_rel_error": round(float(np.quantile(np.abs(errors), 0.9)), 4),
        "median_rel_error_of_kind": {
            kind: round(float(np.median(own)), 4) for kind, own in of_kind.items()
        },
        "at_bound": list(bounds),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """
    Compare from the command line.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(prog="python -m benchmarks.job_models", description=__doc__)
    add = line.add_argument
    add("--data", type=Path, required=True, help="folder with the measured tables")
    add("--profile", required=True, help="a profile's name, or the path of its file")
    add("--choice", action="append", choices=tuple(CHOICES), help="only this one; repeat it")
    add("--json", type=Path, required=True, help="report to write")
    given = line.parse_args(argv)
    with exit_on_bad_input():
        require_writable(given.json)
        profile = load_profile(given.profile)
        runs = read_runs(given.data, profile.job_names, profile.years, profile.server).runs
        if len({run.group for run in runs}) < 2:
            raise InputError(f"{given.data}: runs of two groups are needed to leave one out")
        scaling = read_scaling(given.data, profile.years, [])
        occupancy = fitted_occupancy(profile.service_array())
        found = {}
        for name in given.choice or CHOICES:
            found[name] = report(*left_out_errors(CHOICES[name], runs, scaling, occupancy))
            print(f"{profile.name}, {name}: {found[name]}", flush=True)
        write_json(found, given.json)


if __name__ == "__main__":
    main()
