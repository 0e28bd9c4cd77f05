"""Means and their confidence."""

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
