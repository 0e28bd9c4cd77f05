"""What the command lines of this package share: errors on one line, numbers within limits."""

import argparse
import math
from typing import Any, NoReturn

from env.errors import InputError
from env.simulator.profile import Profile, load_profile


def read_profile(name_or_path: str) -> Profile:
    """
    A profile of fitted parameters.

    :param name_or_path: a shipped profile's name, or a YAML file
    :raises InputError: one line that says what is wrong
    """
    try:
        return load_profile(name_or_path)
    except ValueError as error:
        raise InputError(str(error)) from error


class OneLineParser(argparse.ArgumentParser):
    """A command line whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


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
