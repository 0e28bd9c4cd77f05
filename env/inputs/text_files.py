"""One way to read text and JSON that anybody may have written: within limits, or in one line."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from env.errors import InputError, os_reason

MOST_RECORD_BYTES = 128 << 20
"""Size of a run's record; a day of samples has 30 MiB."""

MOST_JSON_BYTES = 4 << 20
"""Size of a JSON file; the report of a day has 200 KiB."""


def read_text(path: Path, what: str, most_bytes: int, instead: str = "", errors: str = "") -> str:
    """
    The content of a text file.

    :param path: a regular file
    :param what: what it should be, for messages: "a scenario"
    :param most_bytes: how large it may be
    :param instead: what else could have been given, said where the file cannot be read
    :param errors: "replace" to take what is not UTF-8 as question marks; refused otherwise
    :raises InputError: one line that names the file and why it cannot be read
    """

    def refusal(reason: str) -> InputError:
        hint = f"; {instead}" if instead else ""
        return InputError(f"{path}: cannot be read as {what}: {reason}{hint}")

    try:
        # Without waiting: a named pipe has no writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refusal("not a regular file")
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise refusal(f"larger than {most_bytes >> 20} MiB")
        return content.decode("utf-8", errors or "strict")
    except OSError as error:
        raise refusal(os_reason(error).lower()) from error
    except UnicodeDecodeError as error:
        raise refusal("not UTF-8 text") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise refusal("no name of a file") from error  # it holds a zero byte


def read_json(path: Path, what: str) -> Any:
    """
    The content of a JSON file.

    :param path: a regular file of at most `MOST_JSON_BYTES`
    :param what: what it should be, for messages: "a report"
    :raises InputError: one line that names the file and why it cannot be read
    """
    text = read_text(path, what, MOST_JSON_BYTES)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        line = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{path}: cannot be read as {what}: not valid JSON{line}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are Python's own
