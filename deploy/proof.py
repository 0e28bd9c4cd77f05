"""
What proves that a job has done its work: the exit code its wrapper wrote down.

A program's own word is not enough: some exit with 0 when they are told to stop, or when the kernel
kills their workers. So a job runs below a shell that waits for it, answers SIGTERM with 143, looks
for OOM kills, and writes the code into a file that outlives loop, container and Docker daemon.
"""

from collections.abc import Sequence
from pathlib import Path

SHELL = "/bin/sh"
MOUNTED_AT = "/proof"
"""Where a container finds its attempt's folder."""

# Builtins only: an image needs no more than a shell. The arguments stay arguments.
WRAPPER = """
proof=$1 events=$2
shift 2
end() { echo "$1" > "$proof/exit"; exit "$1"; }
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


def wrapped(command: Sequence[str], folder: str, events: str) -> list[str]:
    """
    The command line that leaves a proof.

    :param command: the job's own arguments
    :param folder: where the proof goes, as the job sees it
    :param events: the file in which the kernel counts OOM kills, as the job sees it
    """
    return [SHELL, "-c", WRAPPER, "coretide", folder, events, *command]


def exit_code(folder: Path) -> int | None:
    """
    What the wrapper wrote down.

    :param folder: the attempt's folder
    :return: None if it has not ended, or was killed before it could write
    """
    try:
        text = (folder / "exit").read_bytes()[:8].decode()
        return int(text) if text.endswith("\n") else None
    except (OSError, ValueError):
        return None
