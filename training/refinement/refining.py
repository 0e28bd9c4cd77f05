"""
The machine corrects the model: a profile, and a policy, after runs on the machine itself.

    python -m training.refine --report DIR [--report DIR ...] --profile P --out P2
        [--checkpoint C --out-checkpoint C2]

learns from the records of deployments (`training.refinement.profile_update`), writes the profile
that they leave, and prints predicted against measured before and after. Then the checkpoint goes on
learning on machines drawn from the new profile, whose spreads are used as wide as they are.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from agents.checkpoint import read_checkpoint
from deploy.records.predicted import Figures, PolicySource, aligned, read_policy, table_of
from deploy.records.recorder import POLICY_FILE
from env.errors import InputError, exit_on_bad_input, os_reason
from env.inputs.commandline import OneLineParser, require_folder, require_writable
from env.scenario import Scenario
from env.simulator.profile import Profile, load_profile, save_profile
from training.recipe import Recipe, load_recipe
from training.refinement.live_replay import LiveReplay
from training.refinement.live_run import LiveRun, read_live_run
from training.refinement.predict_run import free_figures, measured_figures, replayed_figures
from training.refinement.profile_update import JOB_SPEED_DRIFT, update

LIMIT_S = 165.0
"""What the whole command takes, but for saving: less than three minutes."""

SCORE_S = 25.0
"""Of that, what is kept for the last score."""

RECIPE = "refine"
NAMED = 6
"""How many parameters are named, at most."""


def refine(
    runs: Sequence[LiveRun], profile: Profile, sources: Sequence[PolicySource | None]
) -> Profile:
    """
    Learn from runs, and print what was predicted of them before and is now.

    :param runs: of one machine
    :param profile: what was known of it
    :param sources: who decided in each run, or who is to be asked now
    :return: what is known of it now
    """
    replays = [LiveReplay(run) for run in runs]
    found = update(profile, replays, JOB_SPEED_DRIFT)
    for replay, source in zip(replays, sources, strict=True):
        columns: dict[str, Figures | None] = {"measured": measured_figures(replay.run)}
        for when, known in (("before", profile), ("after", found.profile)):
            played = replay.play(known)
            columns[f"same decisions, {when}"] = replayed_figures(replay.run, played)
        for when, known in (("before", profile), ("after", found.profile)):
            try:
                columns[f"policy free, {when}"] = free_figures(replay.run, known, source)
            except InputError as error:
                print(f"nothing is predicted with the policy free: {error}")
                break
        print("\n".join(aligned(table_of(columns, replay.run.scenario.service.slo_us))))
    farthest = [f"{name} ({far:+.1f})" for name, far in list(found.moved.items())[:NAMED]]
    print(
        f"{len(found.moved)} parameters have learned something; in standard deviations of their "
        f"priors the farthest have moved by: {', '.join(farthest) or 'none'}"
    )
    return found.profile


def train_on(scenario: Scenario, checkpoint: Path, out: Path, until_s: float) -> None:
    """
    Go on training a checkpoint; the best of it and what comes after is kept.

    :param scenario: the problem, with the new profile
    :param checkpoint: where it begins
    :param out: the file to write; a folder of the same name, without ending, holds the training
    :param until_s: when to end, but for the last score, on the monotonic clock [s]
    :raises InputError: if the checkpoint does not fit
    """
    folder = out.with_suffix("")
    require_folder(folder)
    (folder / "best.zip").unlink(missing_ok=True)  # an earlier turn's, scored on another profile
    # Imported late: torch takes seconds, and a wrong option should not.
    from training.ppo.training_run import train

    recipe: Recipe = load_recipe(RECIPE)
    train(scenario, recipe, 0, folder, resume=checkpoint, fast=True, until_s=until_s)
    shutil.copyfile(folder / "best.zip", out)


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.refine", description=(__doc__ or "").strip().split("\n")[0]
    )
    add = line.add_argument
    add("--report", type=Path, action="append", required=True, help="a run's report folder")
    add("--profile", required=True, help="what is known so far: a name or a YAML file")
    add("--out", type=Path, required=True, help="the profile to write")
    add("--checkpoint", type=Path, help="a policy that goes on learning")
    add("--out-checkpoint", type=Path, help="the policy to write")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Refine from the command line.

    :param argv: command line, the process's own if none is given
    """
    began_s = time.monotonic()
    line = parser()
    given = line.parse_args(argv)
    if (given.checkpoint is None) != (given.out_checkpoint is None):
        line.error("--checkpoint and --out-checkpoint belong together")
    with exit_on_bad_input():
        profile = load_profile(given.profile)
        runs = [read_live_run(folder) for folder in given.report]
        _require_one_machine(runs, profile, given.profile)
        for path in (given.out, given.out_checkpoint):
            require_writable(path)
        if given.checkpoint is not None:
            read_checkpoint(given.checkpoint).require_scenario(runs[0].scenario)
        sources = [_source(folder, given.checkpoint) for folder in given.report]
        found = refine(runs, profile, sources)
        try:
            save_profile(found, given.out)
            print(f"{given.out}: written")
            if given.checkpoint is not None:
                scenario = runs[0].scenario.model_copy(update={"profile": str(given.out.resolve())})
                until_s = began_s + LIMIT_S - SCORE_S
                train_on(scenario, given.checkpoint, given.out_checkpoint, until_s)
                print(f"{given.out_checkpoint}: written")
        except OSError as error:
            raise InputError(f"cannot be written: {os_reason(error)}") from error


def _require_one_machine(runs: Sequence[LiveRun], profile: Profile, name: str) -> None:
    first = runs[0].scenario
    for run in runs:
        if (run.scenario.machine, run.scenario.job_names) != (first.machine, first.job_names):
            raise InputError("--report: the runs must be of one machine and the same jobs")
    for job in first.job_names:
        if job not in profile.jobs:
            known = ", ".join(profile.jobs)
            raise InputError(f"{name}: no job {job}, which the runs have; known jobs: {known}")


def _source(folder: Path, checkpoint: Path | None) -> PolicySource | None:
    """Who decided in a run; the checkpoint that is given where that is not written down."""
    if (folder / POLICY_FILE).exists():
        return read_policy(folder)
    return None if checkpoint is None else PolicySource(source=str(checkpoint), digest="")


if __name__ == "__main__":
    main()
