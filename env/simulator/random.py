"""
Random numbers inside the kernel: one small generator per simulated host.

L'Ecuyer's combined multiplicative generator (CACM 31(6), 1988, figure 3): its state fits two
64-bit integers and it gives the same numbers compiled and in plain Python. Each host has its
own, so an episode does not depend on which hosts it is batched with.
"""

import math

from env.physics.compiled import compiled

FIRST_MODULUS, SECOND_MODULUS = 2147483563, 2147483399

# How far one to four draws move each half of the state.
FIRST_1, FIRST_2, FIRST_3, FIRST_4 = (pow(40014, draws, FIRST_MODULUS) for draws in range(1, 5))
SECOND_1, SECOND_2, SECOND_3, SECOND_4 = (
    pow(40692, draws, SECOND_MODULUS) for draws in range(1, 5)
)

_BITS = 0x7FFFFFFF  # a state fits into them: what is known to be positive divides faster


@compiled
def draw(h, first, second):
    """
    A number in (0, 1), as many draws ahead of the state in `h.random` (int64[2]).

    :param h: host row
    :param first: multiplier of the first generator, to the power of the number of draws
    :param second: the same of the second generator
    """
    difference = first * (h.random[0] & _BITS) % FIRST_MODULUS
    difference -= second * (h.random[1] & _BITS) % SECOND_MODULUS
    if difference < 1:
        difference += FIRST_MODULUS - 1
    return difference * 4.656613e-10


@compiled
def _move_on(h, first, second):
    """Move the state as many draws on."""
    h.random[0] = first * (h.random[0] & _BITS) % FIRST_MODULUS
    h.random[1] = second * (h.random[1] & _BITS) % SECOND_MODULUS


@compiled
def uniform(h):
    """
    A number in (0, 1).

    :param h: host row
    """
    number = draw(h, FIRST_1, SECOND_1)
    _move_on(h, FIRST_1, SECOND_1)
    return number


@compiled
def two_noises(h):
    """
    Two triangular numbers of mean 0 and standard deviation 1; within +-2.45.

    Four draws from one state: none of them waits for another.

    :param h: host row
    """
    one = draw(h, FIRST_1, SECOND_1) + draw(h, FIRST_2, SECOND_2)
    other = draw(h, FIRST_3, SECOND_3) + draw(h, FIRST_4, SECOND_4)
    _move_on(h, FIRST_4, SECOND_4)
    return (one - 1.0) * 2.449489742783178, (other - 1.0) * 2.449489742783178


@compiled
def api_latency(h, median_s, p90_s, p99_s):
    """
    Duration of one Docker call.

    Interpolates the measured quantiles on a logarithmic scale: a quarter of the median at 0,
    the three given ones, and 1.5 times the 99th percentile at 1.

    :param h: host row
    :param median_s: measured median [s]
    :param p90_s: measured 90th percentile [s]
    :param p99_s: measured 99th percentile [s]
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
