"""Means with their confidence, and the digits that a figure can claim."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit


def mean_and_ci95(values: Sequence[float]) -> tuple[float, float | None]:
    """
    The mean and half the width of its 95 % confidence interval (Student's t).

    :param values: independent results; a single one has no interval (None)
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None
    return mean, float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(n))


def margin(values: Sequence[float]) -> float:
    """
    Half the width of the 95 % interval over the mean, infinite for a single value.

    :param values: at least one measurement, in any unit
    """
    mean, half = mean_and_ci95(values)
    return float("inf") if half is None else half / mean


def significant(value: float, digits: int = 5) -> float:
    """
    A value rounded to significant digits, which also keeps a file free of last-bit noise.

    :param value: of any size
    :param digits: how many it can claim
    """
    return float(f"{value:.{digits}g}")
