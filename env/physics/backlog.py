"""
Requests that the clients could not send in time, and are sent later.

Such a backlog grows with load - capacity and drains with capacity - load; while there is one,
memcached answers as fast as it can, at its plateau. The measured runs say little about this.

Units: requests, requests per second (`_qps`), seconds.
"""

import math

from env.physics.compiled import inlined

GONE = 1e-3
"""A smaller backlog is rounding: it counts as none [requests]."""


@inlined
def served_qps(backlog: float, load_qps: float, capacity_qps: float) -> float:
    """
    Rate at which requests are served: the capacity while behind or overloaded, else the load.

    :param backlog: requests that the clients are behind their schedule
    :param load_qps: offered load [1/s]
    :param capacity_qps: largest load that can be served [1/s]
    :return: the rate [1/s]
    """
    return capacity_qps if backlog > 0.0 or load_qps > capacity_qps else load_qps


@inlined
def backlog_after(backlog: float, load_qps: float, capacity_qps: float, step_s: float) -> float:
    """
    What the backlog is after a stretch of constant load and capacity.

    :param backlog: requests at its beginning
    :param load_qps: offered load [1/s]
    :param capacity_qps: largest load that can be served [1/s]
    :param step_s: length of the stretch [s]
    :return: requests at its end, 0 or more
    """
    backlog += (load_qps - capacity_qps) * step_s
    return 0.0 if backlog < GONE else backlog


@inlined
def time_to_drain(backlog: float, load_qps: float, capacity_qps: float) -> float:
    """
    How long until the backlog is gone at this load and capacity.

    :param backlog: requests that the clients are behind their schedule
    :param load_qps: offered load [1/s]
    :param capacity_qps: largest load that can be served [1/s]
    :return: the time [s]; inf without a backlog, and with one that never drains
    """
    drains = backlog > 0.0 and capacity_qps > load_qps
    return backlog / (capacity_qps - load_qps) if drains else math.inf
