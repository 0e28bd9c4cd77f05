"""What all command lines share: errors on one line, numbers within limits, addresses, outputs."""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from env.errors import InputError, escaped, os_reason


class OneLineParser(argparse.ArgumentParser):
    """A command line whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """
        Say what is wrong on one line, and exit with code 2.

        :param message: what is wrong
        """
        self.exit(2, f"{self.prog}: error: {escaped(message)}\n")


def whole_number(low: int, high: int | None = None) -> Any:
    """
    A converter for whole numbers within limits.

    :param low: smallest allowed
    :param high: largest allowed
    """

    def convert(text: str) -> int:
        allowed = f"from {low} to {high}" if high is not None else f"of at least {low}"
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, not {text!r}")
        return value

    return convert


def number(low: float) -> Any:
    """
    A converter for numbers.

    :param low: smallest allowed
    """

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= low):
            raise argparse.ArgumentTypeError(f"must be a number of at least {low:g}, not {text!r}")
        return value

    return convert


def address(text: str) -> tuple[str, int]:
    """
    Convert `HOST:PORT`.

    :param text: what the command line has
    :raises argparse.ArgumentTypeError: if it is no address
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def require_writable(path: Path | None) -> None:
    """
    Make sure that a file can be written before the work is done that fills it.

    :param path: the file; its folder is made if it does not exist. None: nothing is to be written
    :raises InputError: if it cannot
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({os_reason(error)})") from error


def require_folder(folder: Path) -> None:
    """
    Make sure that files can be made in a folder before the work is done that fills it.

    :param folder: the folder, made if it does not exist
    :raises InputError: if that is not possible
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to ({os_reason(error)})") from error
    except ValueError as error:
        raise InputError(f"{folder}: cannot be written to (no name of a folder)") from error


def write_json(content: Any, path: Path) -> None:
    """
    Write a report.

    :param content: what to write
    :param path: the file to write
    :raises InputError: if that cannot be written
    """
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({os_reason(error)})") from error
