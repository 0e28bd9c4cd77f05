"""
Train a policy.

python train.py --env sim --scenario cca-2025
python train.py --recipe general
python train.py --recipe best --fast --seeds 5 --workers 2
python train.py --resume checkpoints/general.zip --scenario mine.yaml
python train.py --env vm --scenario local --resume checkpoints/local.zip
"""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from agents.checkpoint import read_checkpoint
from agents.general_checkpoint import is_general, read_general_checkpoint
from deploy.commands import add_machine_options, settings_of
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_folder, whole_number
from env.scenario import Scenario, load_scenario
from training.ppo.seed_runs import ON_RAY, train_side_by_side
from training.recipe import GeneralRecipe, Recipe, any_recipe


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = OneLineParser(prog="train.py", description="Train a PPO policy.")
    add = command.add_argument
    add("--env", choices=["sim", "vm"], default="sim", help="the simulator, or this machine")
    add("--scenario", help="a shipped scenario or a YAML file (cca-2025)")
    add(
        "--recipe",
        help="a shipped recipe or a YAML file (default; live with --env vm; tune for general.zip)",
    )
    add(
        "--steps",
        type=whole_number(1),
        help="decisions (for any scenario: lists to try), in whole rollouts (the recipe's)",
    )
    add("--seed", type=whole_number(0), default=0, help="of everything random (%(default)s)")
    add(
        "--seeds", type=whole_number(1), default=1, help="runs, each of the next seed (%(default)s)"
    )
    add(
        "--workers",
        type=workers,
        default=1,
        help="processes that share them; or ray, the Ray cluster of this machine (%(default)s)",
    )
    add("--out", type=Path, help="folder of the run, or of all (runs/SCENARIO-RECIPE-SEED)")
    add("--resume", type=Path, help="a checkpoint to go on from")
    add("--fast", action="store_true", help="the fused trainer: same algorithm, less overhead")
    machine = command.add_argument_group("with --env vm", "memcached must be under load")
    add_machine_options(machine)
    return command


def main(argv: Sequence[str] | None = None) -> None:
    """
    Train as the command line says.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    with exit_on_bad_input():
        if arguments.seeds > 1 or arguments.workers != 1:
            train_seeds(arguments)
        else:
            print(train_one(arguments))


def train_one(arguments: argparse.Namespace) -> str:
    """
    One run.

    :param arguments: what `parser` read
    :return: what it has come to, a line
    :raises InputError: if the recipe, the scenario or what is gone on from does not fit
    """
    name = arguments.recipe or default_recipe(arguments)
    recipe = any_recipe(name)
    if arguments.steps:
        recipe = recipe.model_copy(update={"steps": arguments.steps})
    if isinstance(recipe, GeneralRecipe):
        return train_for_any_scenario(arguments, recipe)
    scenario = load_scenario(arguments.scenario or "cca-2025")
    folder = run_folder(arguments)
    if arguments.resume:
        read_checkpoint(arguments.resume).warn(scenario)
    if arguments.env == "vm":
        return train_on_this_machine(arguments, scenario, recipe, folder)
    require_folder(folder)
    try:
        # Imported late: torch takes seconds, and a wrong option should not.
        from training.ppo.training_run import train

        best = train(
            scenario, recipe, arguments.seed, folder, resume=arguments.resume, fast=arguments.fast
        )
    except KeyboardInterrupt:  # before `train` has something to save, or while it saves
        print(f"stopped; {folder} has what was saved so far, if anything", file=sys.stderr)
        sys.exit(130)
    return best_of(folder, dataclasses.asdict(best))


def train_seeds(arguments: argparse.Namespace) -> None:
    """
    Several runs that differ in their seed alone, shared out to workers.

    :param arguments: what `parser` read
    :raises InputError: if a run cannot begin, or the cluster cannot be reached
    """
    if arguments.env == "vm":
        raise InputError("--seeds, --workers: for the simulator only")
    runs = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        run = argparse.Namespace(**vars(arguments) | {"seed": seed, "out": None})
        named = run_folder(run)  # reads recipe and scenario
        run.out = arguments.out / str(seed) if arguments.out else named
        runs.append(run)
    if resumed := arguments.resume:
        (read_general_checkpoint if is_general(resumed) else read_checkpoint)(resumed)
    for run in runs:
        require_folder(run.out)
    for said in train_side_by_side(train_one, runs, arguments.workers):
        print(said, flush=True)


def run_folder(arguments: argparse.Namespace) -> Path:
    """
    Where a run writes.

    :param arguments: what `parser` read
    :raises InputError: if the recipe or the scenario cannot be read
    """
    if arguments.out:
        return Path(arguments.out)
    recipe = arguments.recipe or default_recipe(arguments)
    for_any = isinstance(any_recipe(recipe), GeneralRecipe)
    scenario = arguments.scenario or ("" if for_any else "cca-2025")
    names = [load_scenario(scenario).name] if scenario else []
    return Path("runs", "-".join([*names, Path(recipe).stem, str(arguments.seed)]))


def best_of(folder: Path, figures: dict[str, float]) -> str:
    """
    The line that a run ends with.

    :param folder: of the run
    :param figures: of its best checkpoint
    """
    said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    return f"best of {folder} on the selection traces (simulated): {said}"


def workers(text: str) -> int:
    """
    Convert a number of processes, or `ray`.

    :param text: what the command line has
    :return: the number, or `ON_RAY`
    :raises argparse.ArgumentTypeError: if it is neither
    """
    return ON_RAY if text == "ray" else int(whole_number(1)(text))


def default_recipe(arguments: argparse.Namespace) -> str:
    """
    The recipe where nobody names one.

    :param arguments: what `parser` read
    """
    if arguments.env == "vm":
        return "live"
    return "tune" if arguments.resume and is_general(arguments.resume) else "default"


def train_for_any_scenario(arguments: argparse.Namespace, recipe: GeneralRecipe) -> str:
    """
    Train one network on the scenarios of a recipe, or tune it to the one that is given.

    :param arguments: what `parser` read
    :param recipe: how to train
    :return: what it has come to, a line
    :raises InputError: if the checkpoint to go on from does not fit
    """
    if arguments.env == "vm":
        raise InputError("--recipe: one for several scenarios is for the simulator only")
    if arguments.fast:
        raise InputError("--fast: for a recipe of one scenario only")
    if arguments.scenario:
        alone = {"scenarios": (arguments.scenario,), "family": 0, "selection_family": 0}
        recipe = recipe.model_copy(update=alone)
    if arguments.resume:
        read_general_checkpoint(arguments.resume)
    folder = run_folder(arguments)
    require_folder(folder)
    # Imported late: torch takes seconds, and a wrong option should not.
    from training.general.general_run import train_general

    return best_of(folder, train_general(recipe, arguments.seed, folder, arguments.resume))


def train_on_this_machine(
    arguments: argparse.Namespace, scenario: Scenario, recipe: Recipe, folder: Path
) -> str:
    """
    Train with `--env vm`.

    :param arguments: what `parser` read
    :param scenario: the problem
    :param recipe: how to train
    :param folder: of this run
    :return: what it has come to, a line
    :raises InputError: if the checkpoint or the machine does not fit
    """
    if arguments.fast:
        raise InputError("--fast: for the simulator only")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # undo everything then, too
    from training.ppo.live_training import train_live

    settings = settings_of(arguments, folder / "episodes")
    figures = train_live(scenario, recipe, arguments.seed, folder, settings, arguments.resume)
    said = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if key != "traces")
    return f"{folder}/last.zip, on this machine (measured): {said}"


if __name__ == "__main__":
    main()
