"""
Measure a machine, explain it, and fit a profile to it.

    python -m training.characterise --data DIR --out DIR
"""

from __future__ import annotations

from pathlib import Path

from env.commandline import OneLineParser
from env.errors import exit_on_bad_input
from training.published import write_report


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.characterise", description=__doc__.strip().split("\n")[0]
    )
    add = line.add_argument
    add("--data", type=Path, required=True, help="folder of published tables to analyse")
    add("--out", type=Path, required=True, help="folder for tables, pictures and the report")
    return line


def main() -> None:
    """Analyse, write and say what was found."""
    given = parser().parse_args()
    with exit_on_bad_input():
        for text in write_report(given.data, given.out):
            print(text)
        print(f"report: {given.out / 'report.html'}")


if __name__ == "__main__":
    main()
