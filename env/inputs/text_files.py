"""One way to read text and JSON that anybody may have written: within limits, or in one line."""

import contextlib
import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

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
    content = read_bytes(path, what, most_bytes, instead)
    try:
        return content.decode("utf-8", errors or "strict")
    except UnicodeDecodeError as error:
        raise _refusal(path, what, "not UTF-8 text", instead) from error


def read_bytes(path: Path, what: str, most_bytes: int, instead: str = "") -> bytes:
    """
    The content of any file, for which see `read_text`.

    :param path: a regular file
    :param what: what it should be, for messages
    :param most_bytes: how large it may be
    :param instead: what else could have been given
    :raises InputError: one line that names the file and why it cannot be read
    """
    with open_regular(path, what, instead) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise _too_large(path, what, most_bytes, instead)
    return content


def each_line(path: Path, what: str, most_bytes: int) -> Iterator[str]:
    """
    The lines of a text file one by one, without their ends; what is not UTF-8 are question marks.

    :param path: a regular file
    :param what: what it should be, for messages
    :param most_bytes: how large it may be
    :raises InputError: one line that names the file and why it cannot be read
    """
    with open_regular(path, what) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise _too_large(path, what, most_bytes)
        for line in file:
            yield line.decode(errors="replace").rstrip("\r\n")


@contextlib.contextmanager
def open_regular(path: Path, what: str, instead: str = "") -> Iterator[IO[bytes]]:
    """
    A regular file, open; neither pipes nor devices are waited for.

    :param path: the file
    :param what: what it should be, for messages
    :param instead: what else could have been given
    :raises InputError: if it is none, or cannot be read
    """
    try:
        # Without waiting: a named pipe has no writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _refusal(path, what, "not a regular file", instead)
            yield file
    except OSError as error:
        raise _refusal(path, what, os_reason(error).lower(), instead) from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise _refusal(path, what, "no name of a file", instead) from error  # it holds a zero byte


def read_expanded(path: Path, what: str, most_bytes: int) -> bytes:
    """
    The content of a file, expanded if its name ends in `.gz`: a small one may hold very much.

    :param path: a regular file
    :param what: what it should be, for messages
    :param most_bytes: how large it may be, also once it is expanded
    :raises InputError: one line that names the file and why it cannot be read
    """
    content = read_bytes(path, what, most_bytes)
    if path.suffix != ".gz":
        return content
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _refusal(path, what, "no whole gzip file") from error
    if len(content) > most_bytes:
        raise _refusal(path, what, f"larger than {most_bytes >> 20} MiB once expanded")
    return content


def _too_large(path: Path, what: str, most_bytes: int, instead: str = "") -> InputError:
    return _refusal(path, what, f"larger than {most_bytes >> 20} MiB", instead)


def _refusal(path: Path, what: str, reason: str, instead: str = "") -> InputError:
    hint = f"; {instead}" if instead else ""
    return InputError(f"{path}: cannot be read as {what}: {reason}{hint}")


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
