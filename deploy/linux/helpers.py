"""
How modules of this installation run in processes of their own.

`python -m` looks for modules in the current folder first, where anybody may have put some, and
programs may read their settings there. A helper looks where its parent has found its modules, and
its current folder is the root folder: paths that it is given must be absolute. It is not spared by
the kernel as its parent may be (`deploy.linux.standing`), and Ctrl-C ends it without a word unless
it says otherwise.
"""

import sys
from pathlib import Path

INSTALLATION = Path(__file__).resolve().parents[2]
"""The folder that holds the packages `env`, `agents`, `training` and `deploy`."""

PROGRAM = """\
import os, pathlib, runpy, signal, sys
sys.path[:] = {path!r}
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
from deploy.linux import standing
standing.expose()
os.umask(os.umask(0) | 0o022)
os.chdir("/")
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def helper_command(module: str, *arguments: str) -> list[str]:
    """
    A command line that runs a module as `python -m` does, isolated from the current folder.

    :param module: its dotted name
    :param arguments: the module's command line
    :return: program and arguments
    """
    # A relative entry means the current folder.
    trusted = [entry for entry in sys.path if Path(entry).is_absolute()]
    program = PROGRAM.format(path=[str(INSTALLATION), *trusted], module=module)
    return [sys.executable, "-I", "-c", program, *arguments]
