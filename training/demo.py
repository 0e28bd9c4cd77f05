"""
The shipped policy beside the reference controllers, on the course's own trace.

    python -m training.demo

Runs every policy three times, as the course asks, on mcperf's dynamic load with seed 2333 and
10 s intervals; prints the table and writes one picture per policy into `demo/`.
"""

import time
from pathlib import Path

from env.errors import exit_on_bad_input
from training.evaluate import evaluate, parser
from training.report import require_writable, show, write_json

CHECKPOINT = Path("checkpoints/best.zip")
REFERENCES = ("sequential", "concurrent", "threshold-groups")
FOLDER = Path("demo")


def main() -> None:
    """Evaluate, print and plot."""
    started_s = time.monotonic()
    shipped = [str(CHECKPOINT)] if CHECKPOINT.is_file() else []
    line = ["--scenario", "cca-2025", "--interval", "10", "--trace-seed", "2333"]
    line += ["--episodes", "3", "--plots", str(FOLDER)]
    for name in (*shipped, *REFERENCES):
        line += ["--policy", name]
    with exit_on_bad_input():
        require_writable(FOLDER / "results.json")
        content = evaluate(parser().parse_args(line))
        show(content)
        write_json(content, FOLDER / "results.json")
    if not shipped:
        print(f"There is no trained policy in {CHECKPOINT} yet.")
    print(f"Pictures and figures are in {FOLDER}/ ({time.monotonic() - started_s:.0f} s).")


if __name__ == "__main__":
    main()
