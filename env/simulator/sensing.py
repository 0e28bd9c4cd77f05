"""
What the sensors of a host show: load, CPU, job states, and a latency probe where one is asked for.

Every function takes a host row `h` (`env.simulator.host`).
"""

import math

from env.codes import PENDING, RUNNING
from env.physics.backlog import served_qps
from env.physics.compiled import compiled, inlined
from env.physics.parameters import SENSOR_NOISE
from env.physics.service import mixture_p95
from env.simulator.guarding import PROBES_PER_S, account
from env.simulator.random import two_noises
from env.simulator.rates import SOON_S

_FEWEST = 1e-3  # requests in a window without any, whose count does not scatter


@inlined
def sense(h):
    """
    Read the sensors: load and CPU over the last polling window, job states.

    :param h: host row
    """
    if h.accounted_s > h.now_s:
        return  # the last interval was completed beyond the last job's end, whose reading stands
    account(h)
    read_use(h)
    read_jobs(h)
    if h.probe_window_s > 0.0:
        _read_probe(h)


@compiled
def read_use(h):
    """
    Read load and CPU use over the last polling window.

    :param h: host row
    """
    rate = served_qps(h.backlog, h.load_qps, h.capacity_qps)
    cpu_cores = h.service_cpu
    if h.turned_s[0] > h.now_s - h.period_s:
        rate, cpu_cores = _window_means(h, rate, cpu_cores)
    # Requests arrive at random, so a window's count scatters by its square root at least.
    counted = max(rate * h.period_s, _FEWEST)
    spread = math.sqrt(1.0 / counted + h.host_params[SENSOR_NOISE] ** 2)
    rate_noise, cpu_noise = two_noises(h)
    h.qps = rate * max(0.0, 1.0 + spread * rate_noise)
    h.cpu_cores = cpu_cores * max(0.0, 1.0 + spread * cpu_noise)


@compiled
def read_jobs(h):
    """
    See where the jobs stand.

    :param h: host row
    """
    for job in range(h.job_state.shape[0]):
        starting = h.true_state[job] == PENDING and h.sent_state[job] != PENDING
        h.job_state[job] = RUNNING if starting else h.true_state[job]


@compiled
def _window_means(h, rate, cpu_cores):
    """
    Requests served and CPU used a second over the last polling window, which saw a hiccup.

    :param h: host row
    :param rate: requests served now [1/s]
    :param cpu_cores: CPU used now [vCPUs]
    """
    began_s, until_s = h.now_s - h.period_s, h.now_s
    served = used = 0.0
    for turn in range(h.turned_s.shape[0]):
        from_s = max(h.turned_s[turn], began_s)
        served += rate * (until_s - from_s)
        used += cpu_cores * (until_s - from_s)
        until_s, rate, cpu_cores = from_s, h.turned_qps[turn], h.turned_cpu[turn]
    served += rate * (until_s - began_s)
    used += cpu_cores * (until_s - began_s)
    return served / h.period_s, used / h.period_s


@compiled
def _read_probe(h):
    """
    Read p95 and cycles per instruction over a window that has passed, and begin the next one.

    Between two windows the last reading stands. The first reading comes at once, as if the probe
    had been running before the loop.
    """
    window_s = h.now_s - h.probe_began_s
    if window_s < h.probe_window_s - SOON_S and h.probed_p95_us > 0.0:
        return
    p95_us, stretch = h.p95_us, h.stretch
    if h.probe_count > 0:
        p95_us = mixture_p95(h.probe_weight, h.probe_p95, h.probe_shape, h.probe_count)
        if h.probe_cpu_s > 0.0:
            stretch = h.probe_stretched_s / h.probe_cpu_s
    # A sample's quantile scatters by sqrt(q (1 - q) / n) / density; the density of the
    # log-logistic tail at its p95 is 0.0475 x shape / p95.
    probes = PROBES_PER_S * max(window_s, h.probe_window_s)
    p95_noise, cpi_noise = two_noises(h)
    h.probed_p95_us = p95_us * math.exp(p95_noise / (h.tail_shape * math.sqrt(0.0475 * probes)))
    # A reading of one polling window scatters by the sensor noise; a longer one averages.
    polls = max(1.0, max(window_s, h.probe_window_s) / h.period_s)
    h.probed_cpi = stretch * (1.0 + h.host_params[SENSOR_NOISE] / math.sqrt(polls) * cpi_noise)
    h.probe_began_s = h.now_s
    h.probe_count = 0
    h.probe_cpu_s = 0.0
    h.probe_stretched_s = 0.0
