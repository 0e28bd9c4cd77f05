"""
The shipped policy beside the reference controllers, on the course's own trace.

    python -m training.demo

Runs every policy three times, as the course asks, on mcperf's dynamic load with seed 2333 and
10 s intervals; prints the table and writes one picture per policy into `demo/`.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from agents.checkpoint import find_checkpoint
from env.commandline import OneLineParser, require_writable
from env.errors import exit_on_bad_input
from training.evaluation.comparison import evaluate, parser
from training.evaluation.figures import show, write_json

CHECKPOINT = Path("checkpoints/best.zip")
REFERENCES = ("sequential", "concurrent", "threshold-groups")
FOLDER = Path("demo")


def main(argv: Sequence[str] | None = None) -> None:
    """
    Evaluate, print and plot.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(prog="python -m training.demo", description=__doc__.splitlines()[1])
    line.parse_args(argv)
    started_s = time.monotonic()
    shipped = [str(CHECKPOINT)] if find_checkpoint(CHECKPOINT).is_file() else []
    options = ["--scenario", "cca-2025", "--interval", "10", "--trace-seed", "2333"]
    options += ["--episodes", "3", "--plots", str(FOLDER)]
    for name in (*shipped, *REFERENCES):
        options += ["--policy", name]
    with exit_on_bad_input():
        require_writable(FOLDER / "results.json")
        content = evaluate(parser().parse_args(options))
        show(content)
        write_json(content, FOLDER / "results.json")
    if not shipped:
        print(f"There is no trained policy in {CHECKPOINT} yet.")
    print(f"Pictures and figures are in {FOLDER}/ ({time.monotonic() - started_s:.0f} s).")


if __name__ == "__main__":
    main()
