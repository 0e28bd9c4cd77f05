"""
Run a policy on this machine: memcached keeps its SLO, the batch jobs finish early.

python deploy.py --checkpoint best.zip --scenario cca-2025 --memcached 127.0.0.1:11211
"""

import gc
import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """
    Deploy as the command line says.

    :param argv: command line, the process's own if none is given
    :return: 0 if all is well, 1 if a job or the restoring failed, 128 + signal if interrupted
    :raises SystemExit: with code 2 if what was given is wrong or the machine is not fit for it
    """
    from deploy.records import terminal
    from deploy.safety import guardian

    gc.disable()  # until the loop decides: nothing that is imported is garbage
    os.umask(os.umask(0) | 0o022)  # nobody else may write to what a deployment makes
    try:
        # Forked first, so that it stays small; everything else is imported afterwards.
        watcher = guardian.spawn()
    except OSError as error:
        terminal.complain(f"no guardian can be started: {error.strerror}")
        return 2
    try:
        from deploy.jobs import spared

        spared.import_digests()
        from deploy import commands

        return commands.main(argv, watcher)
    finally:
        watcher.close()


if __name__ == "__main__":
    # Until something has to be undone, Ctrl-C ends it without a word, as other signals do.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
