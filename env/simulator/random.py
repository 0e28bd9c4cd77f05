"""
Random numbers inside the kernel: one small generator per simulated host.

L'Ecuyer's combined multiplicative generator (CACM 31(6), 1988, figure 3): its state fits two
64-bit integers and it gives the same numbers compiled and in plain Python. Each host has its
own, so an episode does not depend on which hosts it is batched with.
"""

import math

from env.simulator.compiled import compiled

FIRST_MODULUS, SECOND_MODULUS = 2147483563, 2147483399


@compiled
def uniform(h):
    """A number in (0, 1); advances the state in `h.random` (int64[2])."""
    first = 40014 * h.random[0] % 2147483563
    second = 40692 * h.random[1] % 2147483399
    h.random[0] = first
    h.random[1] = second
    difference = first - second
    if difference < 1:
        difference += 2147483562
    return difference * 4.656613e-10


@compiled
def noise(h):
    """A triangular number of mean 0 and standard deviation 1; within +-2.45."""
    return (uniform(h) + uniform(h) - 1.0) * 2.449489742783178


@compiled
def api_latency(h, median_s, p90_s, p99_s):
    """
    Duration of one Docker call.

    Interpolates the measured quantiles on a logarithmic scale: a quarter of the median at 0,
    the three given ones, and 1.5 times the 99th percentile at 1.
    """
    rank = uniform(h)
    if rank < 0.5:
        low, high, part = 0.25 * median_s, median_s, rank / 0.5
    elif rank < 0.9:
        low, high, part = median_s, p90_s, (rank - 0.5) / 0.4
    elif rank < 0.99:
        low, high, part = p90_s, p99_s, (rank - 0.9) / 0.09
    else:
        low, high, part = p99_s, 1.5 * p99_s, (rank - 0.99) / 0.01
    return low * math.exp(part * math.log(high / low))
