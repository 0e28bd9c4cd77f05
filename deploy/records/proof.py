"""
What proves that a job has done its work: the exit code its wrapper wrote down.

A program's own word is not enough: some exit with 0 when they are told to stop, or when the kernel
kills their workers. So a job runs below a shell that waits for it, answers SIGTERM with 143, looks
for OOM kills, and writes the code into a file that outlives loop, container and Docker daemon.

The shell first waits at a gate (`deploy.jobs.gate`) for the job's thread count, and marks the file
when it has passed: an attempt without the mark has never begun.

The file is there, with room for the code, before the job starts: a disk that is full by the time
the job has ended does not undo its work. It is all of the machine's disk that a container sees.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

SHELL = "/bin/sh"
MOUNTED_AT = "/proof/exit"
"""Where a container finds its attempt's proof."""

NOT_YET = "none\n"
"""As long as what the wrapper writes over it, `open`."""

# Builtins only: an image needs no more than a shell. The arguments stay arguments. What the proof
# holds is written over, not cut off first: that would give its room away. What follows the first
# four arguments is each allowed thread count with the command for it, all of one length: those
# before the chosen one are dropped, and it goes round to the end, where the others are dropped.
# A writer that ends without a line is none; a gate that is gone opens no more.
WRAPPER = """
proof=$1 events=$2 gate=$3 length=$4
shift 4
until read -r threads < "$gate"; do
    [ -p "$gate" ] || exit
done
echo open 1<> "$proof"
until [ "$1" = "$threads" ]; do
    shift "$((length + 1))" || exit
done
left=$length
while [ "$left" -gt 0 ]; do
    shift
    set -- "$@" "$1"
    left=$((left - 1))
done
shift "$(($# - length))"
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

OOM, TERMINATED, NO_PROOF, CANCELLED = 137, 143, -1, -2


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


def forget(folder: Path) -> None:
    """
    Have a proof say again that its attempt has not begun.

    :param folder: the attempt's folder, of which nothing runs
    :raises OSError: if it cannot be written
    """
    with proof_file(folder).open("r+", encoding="utf-8") as file:
        file.write(NOT_YET)


def wrapped(commands: Mapping[int, Sequence[str]], file: str, events: str, gate: str) -> list[str]:
    """
    The command line that waits at a gate, and leaves a proof.

    :param commands: the job's own arguments for each thread count, all of one length
    :param file: path of the proof, as the job sees it
    :param events: the file in which the kernel counts OOM kills, as the job sees it
    :param gate: the pipe that the thread count comes from, as the job sees it
    """
    (length,) = {len(command) for command in commands.values()}
    choice = [part for count, command in commands.items() for part in (str(count), *command)]
    return [SHELL, "-c", WRAPPER, "coretide", file, events, gate, str(length), *choice]


def begun(folder: Path) -> bool:
    """
    Whether an attempt has passed its gate.

    :param folder: the attempt's folder
    :raises OSError: if its proof cannot be read
    """
    with proof_file(folder).open("rb") as file:
        return file.read(len(NOT_YET)) != NOT_YET.encode()


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
