"""
Train a policy.

python train.py --env sim --scenario cca-2025
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from env.commandline import OneLineParser, whole_number
from env.errors import InputError, exit_on_bad_input
from env.scenario import load_scenario
from training.recipe import load_recipe


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = OneLineParser(prog="train.py", description="Train a PPO policy.")
    add = command.add_argument
    add("--env", choices=["sim"], default="sim", help="where to learn: the simulator")
    add("--scenario", default="cca-2025", help="a shipped scenario or a YAML file")
    add("--recipe", default="default", help="a shipped recipe or a YAML file of hyperparameters")
    add("--steps", type=whole_number(1), help="decisions to train for (the recipe's)")
    add("--seed", type=whole_number(0), default=0, help="of everything random (%(default)s)")
    add("--out", type=Path, help="folder of the run (runs/SCENARIO-RECIPE-SEED)")
    add("--resume", type=Path, help="a checkpoint to go on from")
    add("--fast", action="store_true", help="the fused trainer: same algorithm, less overhead")
    return command


def main(argv: Sequence[str] | None = None) -> None:
    """
    Train as the command line says.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    with exit_on_bad_input():
        scenario = load_scenario(arguments.scenario)
        recipe = load_recipe(arguments.recipe)
        if arguments.steps:
            recipe = recipe.model_copy(update={"steps": arguments.steps})
        name = f"{scenario.name}-{Path(arguments.recipe).stem}-{arguments.seed}"
        folder = arguments.out or Path("runs") / name
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file; --out wants a folder")

        # Imported late: torch takes seconds, and a wrong option should not.
        from training.ppo import train

        best = train(
            scenario,
            recipe,
            arguments.seed,
            folder,
            resume=arguments.resume,
            fast=arguments.fast,
        )
    figures = ", ".join(f"{key} {value:.4g}" for key, value in dataclasses.asdict(best).items())
    print(f"best of {folder} on the selection traces (simulated): {figures}")


if __name__ == "__main__":
    main()
