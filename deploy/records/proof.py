"""
What proves that a job has done its work: the exit code its wrapper wrote down.

A program's own word is not enough: some exit with 0 when they are told to stop, or when the kernel
kills their workers. So a job runs below a shell that waits for it, answers SIGTERM with 143, looks
for OOM kills, and writes the code into a file that outlives loop, container and Docker daemon.

The file is there, with room for the code, before the job starts: a disk that is full by the time
the job has ended does not undo its work. It is all of the machine's disk that a container sees.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

SHELL = "/bin/sh"
MOUNTED_AT = "/proof/exit"
"""Where a container finds its attempt's proof."""

NOT_YET = "none\n"

# Builtins only: an image needs no more than a shell. The arguments stay arguments. What the proof
# holds is written over, not cut off first: that would give its room away.
WRAPPER = """
proof=$1 events=$2
shift 2
end() { echo "$1" 1<> "$proof"; exit "$1"; }
trap 'kill "$child"; end 143' TERM
"$@" < /dev/null &
child=$!
wait "$child"
code=$?
if [ -r "$events" ]; then
    while read -r key count; do
        [ "$key" = oom_kill ] && [ "$count" != 0 ] && code=137
    done < "$events"
fi
end "$code"
"""

OOM, TERMINATED, NO_PROOF = 137, 143, -1


def prepare(folder: Path) -> None:
    """
    Make room for a proof.

    :param folder: the attempt's folder; a proof that it holds stays
    :raises OSError: if the disk has none
    """
    path = proof_file(folder)
    if not path.exists() or path.stat().st_size < len(NOT_YET):
        path.write_text(NOT_YET, encoding="utf-8")
        path.chmod(0o666)  # a container's user may be any; nobody else comes past the folder above


def proof_file(folder: Path) -> Path:
    """
    Where the proof of an attempt is.

    :param folder: the attempt's folder
    """
    return folder / "exit"


def wrapped(command: Sequence[str], file: str, events: str) -> list[str]:
    """
    The command line that leaves a proof.

    :param command: the job's own arguments
    :param file: path of the proof, as the job sees it
    :param events: the file in which the kernel counts OOM kills, as the job sees it
    """
    return [SHELL, "-c", WRAPPER, "coretide", file, events, *command]


def exit_code(folder: Path) -> int | None:
    """
    What the wrapper wrote down.

    :param folder: the attempt's folder
    :return: None if it has not ended, or was killed before it could write
    """
    try:
        with proof_file(folder).open("rb") as file:
            code, end, _ = file.read(8).partition(b"\n")
        return int(code) if end else None
    except (OSError, ValueError):
        return None


def trim(folder: Path) -> int:
    """
    Cut off what a job has written behind its proof.

    :param folder: the attempt's folder
    :return: how much that was [bytes]
    """
    with contextlib.suppress(OSError):
        size = proof_file(folder).stat().st_size
        if size > len(NOT_YET):
            os.truncate(proof_file(folder), len(NOT_YET))
            return size - len(NOT_YET)
    return 0
