"""nutcracker, a proxy that hashes each key to one member: Debian's package."""

import os
import shutil
from pathlib import Path

from env.errors import InputError

HOW = "apt-get install nutcracker has it"


def find_nutcracker() -> Path:
    """
    The program, which Debian keeps where only root looks.

    :raises InputError: if it is not installed: one line says how to get it
    """
    folders = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin"
    program = shutil.which("nutcracker", path=folders)
    if program is None:
        raise InputError(f"nutcracker: not found; {HOW}")
    return Path(program)
