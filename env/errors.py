"""Errors that a user can mend, and how every command reports them."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError


class InputError(ValueError):
    """Something the user gave is wrong: one line that names what, where and what is allowed."""


@contextlib.contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Print an `InputError` as one line on stderr and exit with code 2; let bugs raise."""
    try:
        yield
    except InputError as error:
        print(f"coretide: {error}", file=sys.stderr)
        sys.exit(2)


def validation_message(path: Path | str, error: ValidationError, allowed: str = "") -> str:
    """
    The first fault pydantic found, on one line.

    :param path: the file that was read
    :param error: what pydantic raised
    :param allowed: the fields that exist, named when an unknown one was given, or none
    """
    faults = error.errors()
    # A misspelt field is two faults; the unknown name says more than the missing one.
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    field = ".".join(str(part) for part in fault["loc"]) or "(top level)"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "model_type":
        message = "must be a mapping" + ("" if fault["loc"] else allowed)
    if fault["type"] == "extra_forbidden":
        message = f"unknown field{allowed}"
    return " ".join(f"{path}: {field}: {message}".split())
