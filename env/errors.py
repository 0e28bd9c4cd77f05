"""Errors that a user can mend, and how every command reports them."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why a disk may take no more of what is printed."""

LONGEST_SHOWN = 40
"""Characters of a refused value that a message shows."""


class InputError(ValueError):
    """
    Something the user gave is wrong: one line that names what, where and what is allowed.

    :param said: that line; what breaks lines or cannot be shown in it becomes an escape sequence
    """

    def __init__(self, said: str):
        super().__init__(escaped(said))


@contextlib.contextmanager
def exit_on_bad_input(stopped: str = "stopped") -> Iterator[None]:
    """
    Print an `InputError` as one line on stderr and exit with code 2; let bugs raise.

    Ctrl-C is one line, too, and exit code 130; so is a disk that takes no more of what is printed.
    Whoever reads that through a pipe may close it: then it ends without a word.

    :param stopped: what that line says
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except InputError as error:
        print(f"coretide: {error}", file=sys.stderr)
        _flush_or_drop()
        sys.exit(2)
    except OSError as error:
        # Another pipe or disk may be meant.
        if error.errno not in (errno.EPIPE, *NO_ROOM) or not _output_is_refused():
            raise
        _drop_output()
        if isinstance(error, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        print(f"coretide: what is printed cannot be written: {os_reason(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"coretide: {escaped(stopped)}", file=sys.stderr)
        _flush_or_drop()  # Ctrl-C ends who reads it, too
        sys.exit(130)


def _flush_or_drop() -> None:
    """Write what is still to be printed, or give it up where that is refused."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop_output()


def _output_is_refused() -> bool:
    """Whether nothing can be written to stdout, where there is one."""
    with contextlib.suppress(OSError):
        if sys.stdout is not None:
            os.write(1, b"\n")
        return False
    return True


def _drop_output() -> None:
    """Have what is still to be printed go nowhere, so that the interpreter's end does not fail."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def escaped(said: str) -> str:
    """
    Words that may come from anybody; what cannot be shown becomes an escape sequence.

    :param said: the words
    """
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in said
    )


def os_reason(error: OSError) -> str:
    """
    Why the system refused, in words and without its number.

    :param error: what it raised
    """
    return error.strerror or str(error) or "refused"


def fault(error: Exception) -> str:
    """
    What went wrong, in words.

    Of the system's refusals these are the file and the reason, without a number; of a program that
    failed what it said last, if its output was kept as text.

    :param error: what was raised
    """
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        last = (error.stderr or "").strip().splitlines()[-1:]
        return "".join(last) or f"it ended with exit code {error.returncode}"
    if not isinstance(error, OSError):
        return str(error)
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{os_reason(error)}"


WORDING = {
    "missing": "is required",
    "extra_forbidden": "unknown field",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be greater than or equal to {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be less than or equal to {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
}
"""What is said of a kind of fault; pydantic's own context fills the gaps."""

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "decimal": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "set": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
}
"""What is wanted where a value is of the wrong kind, by the first word of pydantic's fault."""


def validation_message(path: Path | str, error: ValidationError, allowed: str = "") -> str:
    """
    The first fault pydantic found, on one line and in words of ours.

    :param path: the file that was read
    :param error: what pydantic raised
    :param allowed: the fields that exist, named when an unknown one was given, or none
    """
    faults = error.errors()
    # A misspelt field is two faults; the unknown name says more than the missing one.
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    kind, where = fault["type"], fault["loc"]
    field = ".".join(str(part) for part in where) or "(top level)"
    if kind in WORDING:
        limits = fault.get("ctx", {}).items()
        message = WORDING[kind].format(
            **{name: f"{one:g}" if isinstance(one, float) else one for name, one in limits}
        )
    else:
        message = f"must be {KINDS.get(kind.partition('_')[0], 'a value that is allowed')}"
    if kind == "extra_forbidden" or (kind == "model_type" and not where):
        message += allowed
    elif kind != "value_error":
        message += _given(fault["input"])
    return " ".join(f"{path}: {field}: {message}".split())


def _given(value: object) -> str:
    if not isinstance(value, str | int | float):
        return ""
    if isinstance(value, int) and abs(value) > 10**LONGEST_SHOWN:  # Python writes no longest ones
        return ", not a number of that many digits"
    return f", not {value!r}" if len(str(value)) <= LONGEST_SHOWN else ""
