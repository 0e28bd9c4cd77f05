"""
Train a policy.

python train.py --env sim --scenario cca-2025
python train.py --recipe general
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
from training.recipe import Recipe, load_recipe


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
        help="decisions, rounded up to whole rollouts (the recipe's)",
    )
    add("--seed", type=whole_number(0), default=0, help="of everything random (%(default)s)")
    add("--out", type=Path, help="folder of the run (runs/SCENARIO-RECIPE-SEED)")
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
        recipe_name = arguments.recipe or default_recipe(arguments)
        recipe = load_recipe(recipe_name)
        if arguments.steps:
            recipe = recipe.model_copy(update={"steps": arguments.steps})
        if recipe.scenarios:
            train_for_any_scenario(arguments, recipe_name, recipe)
            return
        scenario = load_scenario(arguments.scenario or "cca-2025")
        name = f"{scenario.name}-{Path(recipe_name).stem}-{arguments.seed}"
        folder = arguments.out or Path("runs") / name
        if arguments.resume:
            read_checkpoint(arguments.resume).warn(scenario)
        if arguments.env == "vm":
            train_on_this_machine(arguments, scenario, recipe, folder)
            return
        require_folder(folder)

        try:
            # Imported late: torch takes seconds, and a wrong option should not.
            from training.ppo.training_run import train

            best = train(
                scenario,
                recipe,
                arguments.seed,
                folder,
                resume=arguments.resume,
                fast=arguments.fast,
            )
        except KeyboardInterrupt:  # before `train` has something to save, or while it saves
            print(f"stopped; {folder} has what was saved so far, if anything", file=sys.stderr)
            sys.exit(130)
    figures = ", ".join(f"{key} {value:.4g}" for key, value in dataclasses.asdict(best).items())
    print(f"best of {folder} on the selection traces (simulated): {figures}")


def default_recipe(arguments: argparse.Namespace) -> str:
    """
    The recipe where nobody names one.

    :param arguments: what `parser` read
    """
    if arguments.env == "vm":
        return "live"
    return "tune" if arguments.resume and is_general(arguments.resume) else "default"


def train_for_any_scenario(arguments: argparse.Namespace, recipe_name: str, recipe: Recipe) -> None:
    """
    Train one network on the scenarios of a recipe, or tune it to the one that is given.

    :param arguments: what `parser` read
    :param recipe_name: names the run's folder
    :param recipe: how to train
    :raises InputError: if the checkpoint to go on from does not fit
    """
    if arguments.env == "vm":
        raise InputError("--recipe: one for several scenarios is for the simulator only")
    if arguments.scenario:
        alone = {"scenarios": (arguments.scenario,), "family": 0, "selection_family": 0}
        recipe = recipe.model_copy(update=alone)
    names = [load_scenario(name).name for name in recipe.scenarios]
    if arguments.resume:
        read_general_checkpoint(arguments.resume)
    name = f"{Path(recipe_name).stem}-{arguments.seed}"
    if arguments.scenario:
        name = f"{names[0]}-{name}"
    folder = arguments.out or Path("runs") / name
    require_folder(folder)
    # Imported late: torch takes seconds, and a wrong option should not.
    from training.general.general_run import train_general

    best = train_general(recipe, arguments.seed, folder, arguments.resume)
    figures = ", ".join(f"{key} {value:.4g}" for key, value in best.items())
    print(f"best of {folder} on the selection traces (simulated): {figures}")


def train_on_this_machine(
    arguments: argparse.Namespace, scenario: Scenario, recipe: Recipe, folder: Path
) -> None:
    """
    Train with `--env vm`.

    :param arguments: what `parser` read
    :param scenario: the problem
    :param recipe: how to train
    :param folder: of this run
    :raises InputError: if the checkpoint or the machine does not fit
    """
    if arguments.fast:
        raise InputError("--fast: for the simulator only")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # undo everything then, too
    from training.ppo.live_training import train_live

    settings = settings_of(arguments, folder / "episodes")
    figures = train_live(scenario, recipe, arguments.seed, folder, settings, arguments.resume)
    said = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if key != "traces")
    print(f"{folder}/last.zip, on this machine (measured): {said}")


if __name__ == "__main__":
    main()
