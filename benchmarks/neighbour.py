"""
A noisy neighbour: one busy process of normal weight that roams over the vCPUs, half of the time.

    python -m benchmarks.neighbour

It works for `SPELL_S` on a vCPU drawn at random, rests as long, and so on until it is ended.
"""

import os
import random
import time
from collections.abc import Sequence

from env.inputs.commandline import OneLineParser

SPELL_S = 0.5


def main(argv: Sequence[str] | None = None) -> None:
    """
    Disturb for ever.

    :param argv: command line, the process's own if none is given
    """
    what = __doc__.splitlines()[1]
    OneLineParser(prog="python -m benchmarks.neighbour", description=what).parse_args(argv)
    vcpus, draws = sorted(os.sched_getaffinity(0)), random.Random(0)
    while True:
        os.sched_setaffinity(0, {draws.choice(vcpus)})
        end_s = time.monotonic() + SPELL_S
        while time.monotonic() < end_s:
            pass
        time.sleep(SPELL_S)


if __name__ == "__main__":
    main()
