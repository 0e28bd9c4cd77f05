"""
Queueing models of a server under load, and how well each explains a measured sweep.

Three models of growing detail: M/M/1 (one fast server), M/M/m (as many servers as memcached has
threads and cores for) and a closed network, solved by exact mean value analysis, in which a bounded
number of requests is in flight. Each is fitted to the mean response times of a sweep; its
throughput and utilisation then are predictions to hold beside the measured ones.

Formulas: R. Jain, The Art of Computer Systems Performance Analysis (1991), chapters 30 to 36;
E. D. Lazowska et al., Quantitative System Performance (1984), chapters 3 and 6. Times in seconds,
rates in requests per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, least_squares

from env.physics.compiled import allocating

FloatArray = npt.NDArray[np.float64]

SATURATED = 0.97  # a point that serves less than this part of what is asked is past saturation
GOOD = 0.15  # relative error of the response time up to which a model is said to hold
DELAY = 0  # number of servers of a centre where nobody waits


@dataclass(frozen=True)
class Steady:
    """
    A queue in its steady state.

    :param throughput: departures [1/s]
    :param response_s: mean time from arrival to departure [s]
    :param utilisation: of each server
    :param waiting: probability that an arrival has to wait
    :param in_system: mean number of requests, waiting or served
    """

    throughput: float
    response_s: float
    utilisation: float
    waiting: float
    in_system: float


def erlang_c(load: float, servers: int) -> float:
    """
    Probability that an arrival at M/M/m finds every server busy (Erlang's C formula).

    :param load: arrival rate x service time [erlang], under `servers`
    :param servers: number of servers m
    """
    blocking = 1.0  # Erlang's B formula, by its recursion over servers
    for n in range(1, servers + 1):
        blocking = load * blocking / (n + load * blocking)
    return servers * blocking / (servers - load * (1.0 - blocking))


def mmm(arrival: float, service_s: float, servers: int = 1) -> Steady:
    """
    M/M/m: Poisson arrivals, exponential service, one queue (Jain, boxes 31.1 and 31.2).

    :param arrival: arrivals [1/s]
    :param service_s: mean service time [s]
    :param servers: m; 1 gives M/M/1
    :raises ValueError: if more arrives than can be served: there is no steady state
    """
    load = arrival * service_s
    if load >= servers:
        raise ValueError(f"{arrival:g} arrivals/s keep {load:g} of {servers} servers busy")
    waiting = erlang_c(load, servers)
    response_s = service_s * (1.0 + waiting / (servers - load))
    return Steady(arrival, response_s, load / servers, waiting, arrival * response_s)


@allocating
def _recursion(demand_s, servers, customers, think_s):  # type: ignore[no-untyped-def]
    """
    Exact mean value analysis of a closed network with one class of customers.

    Centres with m servers use the exact recursion over the probabilities of fewer than m customers
    (M. Reiser and S. Lavenberg, 1980; Lazowska, chapter 8), which loses digits as servers grow:
    with 8 of them near saturation the throughput is known to 1e-4.

    :param demand_s: service time that one request needs at each centre in all [s], float[K]
    :param servers: number of servers of each centre, `DELAY` if nobody waits there, int[K]
    :param customers: N, at least 1
    :param think_s: time between a response and the customer's next request [s]
    :return: throughput [1/s], float[N], and residence times [s], float[N, K], with 1 to N customers
    """
    centres = len(demand_s)
    throughput = np.zeros(customers)
    residence_s = np.zeros((customers, centres))
    queue = np.zeros(centres)
    # Probability of j customers at each centre, for the j that leave a server idle.
    few = np.zeros((centres, max(servers.max(), 1)))
    few[:, 0] = 1.0
    for n in range(1, customers + 1):
        response_s = 0.0
        for k in range(centres):
            m = servers[k]
            time_s = demand_s[k]
            if m != DELAY:
                idle = 0.0
                for j in range(m - 1):
                    idle += (m - 1 - j) * few[k, j]
                time_s = demand_s[k] / m * (1.0 + queue[k] + idle)
            residence_s[n - 1, k] = time_s
            response_s += time_s
        throughput[n - 1] = n / (think_s + response_s)
        for k in range(centres):
            m = servers[k]
            queue[k] = throughput[n - 1] * residence_s[n - 1, k]
            if m == DELAY:
                continue
            load = throughput[n - 1] * demand_s[k]
            idle = load
            for j in range(m - 1, 0, -1):
                few[k, j] = load / j * few[k, j - 1]
                idle += (m - j) * few[k, j]
            few[k, 0] = max(1.0 - idle / m, 0.0)
    return throughput, residence_s


@dataclass(frozen=True)
class Point:
    """
    One measured point of a sweep.

    :param offered: rate asked for [1/s]; in a closed loop nothing asks: infinite
    :param throughput: rate served [1/s]
    :param response_s: mean response time [s]
    :param in_flight: requests in flight at most: the customers of a closed loop
    :param utilisation: of memcached's servers together, 0 to 1; NaN if not measured
    """

    offered: float
    throughput: float
    response_s: float
    in_flight: float
    utilisation: float = math.nan

    @property
    def saturated(self) -> bool:
        """Whether less was served than asked for; a closed loop always asks for more."""
        return self.throughput < SATURATED * self.offered


def law_error(point: Point) -> float:
    """
    How far a closed-loop point is from the interactive law: N / (X R) - 1 without thinking.

    :param point: a measured point whose customers never think
    """
    return point.in_flight / (point.throughput * point.response_s) - 1.0


@dataclass(frozen=True)
class OpenModel:
    """
    M/M/m behind a constant delay (network, kernel and client, where nobody waits).

    :param servers: number of servers m
    :param service_s: fitted mean service time [s]
    :param delay_s: fitted fixed delay [s]
    """

    servers: int
    service_s: float
    delay_s: float

    @property
    def name(self) -> str:
        """What tables call it."""
        return "M/M/1" if self.servers == 1 else f"M/M/{self.servers}"

    @property
    def capacity(self) -> float:
        """Largest throughput [1/s]."""
        return self.servers / self.service_s

    def predict(self, point: Point) -> Steady | None:
        """
        The state at the point's load; none where more is asked for than can be served.

        :param point: a measured point, of which the load is used
        """
        arrival = min(point.offered, point.throughput)
        if point.saturated or arrival >= self.capacity:
            return None
        steady = mmm(arrival, self.service_s, self.servers)
        response_s = steady.response_s + self.delay_s
        return Steady(arrival, response_s, steady.utilisation, steady.waiting, arrival * response_s)


@dataclass(frozen=True)
class ClosedModel:
    """
    A bounded number of requests that alternate between memcached and a constant delay.

    A generator that is asked for a rate waits between requests; the model waits for as long as
    makes it send that rate, and not at all where the rate cannot be reached.

    :param servers: memcached's m
    :param service_s: fitted mean service time [s]
    :param delay_s: fitted fixed delay [s]
    """

    servers: int
    service_s: float
    delay_s: float
    name: str = "closed network"

    @property
    def capacity(self) -> float:
        """Largest throughput [1/s]."""
        return self.servers / self.service_s

    def predict(self, point: Point) -> Steady | None:
        """
        The state at the point's load.

        :param point: a measured point, of which the load and the requests in flight are
            used
        """
        customers = max(round(point.in_flight), 1)
        demand_s = np.array([self.service_s, self.delay_s])
        servers = np.array([self.servers, DELAY], dtype=np.int64)

        def solve(think_s: float) -> tuple[float, float]:
            throughput, residence_s = _recursion(demand_s, servers, customers, think_s)
            return float(throughput[-1]), float(residence_s[-1].sum())

        throughput, response_s = solve(0.0)
        if throughput > point.offered:
            # With this much thinking the rate is not reached even if nobody ever waits.
            most_s = customers / point.offered
            think_s = brentq(lambda z: solve(z)[0] - point.offered, 0.0, most_s, rtol=1e-6)
            throughput, response_s = solve(think_s)
        utilisation = throughput * self.service_s / self.servers
        return Steady(throughput, response_s, utilisation, math.nan, throughput * response_s)


Model = OpenModel | ClosedModel


def fit_open(points: Sequence[Point], servers: int) -> OpenModel:
    """
    M/M/m with a constant delay, fitted to the response times below saturation.

    :param points: a sweep with at least three points below saturation
    :param servers: number of servers m
    :raises ValueError: if there are fewer
    """
    calm = [point for point in points if not point.saturated and math.isfinite(point.offered)]
    if len(calm) < 3:
        raise ValueError(f"{len(calm)} points below saturation; a fit takes at least 3")
    rate = np.array([point.throughput for point in calm])
    measured = np.log([point.response_s for point in calm])
    # No slower than what was served: capacity is at least the largest throughput.
    longest_s = 0.999 * servers / rate.max()

    def residuals(x: FloatArray) -> FloatArray:
        service_s, delay_s = np.exp(x)
        times = [mmm(float(r), float(service_s), servers).response_s + delay_s for r in rate]
        result: FloatArray = np.log(times) - measured
        return result

    return OpenModel(servers, *_fit(residuals, longest_s, float(np.exp(measured.min()))))


def fit_closed(points: Sequence[Point], servers: int) -> ClosedModel:
    """
    The closed network, fitted to response times and throughputs of all points.

    :param points: a sweep with at least three points, each with its `in_flight`
    :param servers: memcached's m
    :raises ValueError: if there are fewer
    """
    if len(points) < 3:
        raise ValueError(f"{len(points)} points; a fit takes at least 3")
    measured = np.log([[point.throughput, point.response_s] for point in points])
    best = max(point.throughput for point in points)

    def residuals(x: FloatArray) -> FloatArray:
        service_s, delay_s = np.exp(x)
        model = ClosedModel(servers, float(service_s), float(delay_s))
        states = [model.predict(point) for point in points]
        predicted = np.log([[s.throughput, s.response_s] for s in states if s is not None])
        result: FloatArray = (predicted - measured).ravel()
        return result

    fastest_s = float(np.exp(measured[:, 1].min()))
    return ClosedModel(servers, *_fit(residuals, 1.2 * servers / best, fastest_s))


def _fit(
    residuals: Callable[[FloatArray], FloatArray], longest_s: float, fastest_s: float
) -> tuple[float, float]:
    """Service time under a bound and delay under the fastest response, by robust least squares."""
    low = np.log([1e-3 * longest_s, 1e-6 * fastest_s])
    high = np.log([longest_s, fastest_s])
    start = np.log([0.8 * longest_s, 0.7 * fastest_s])
    found = least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-4
    )
    service_s, delay_s = np.exp(found.x)
    return float(service_s), float(delay_s)


@dataclass(frozen=True)
class Comparison:
    """
    One model beside what was measured.

    :param model: the fitted model
    :param points: the sweep, by offered load, then by customers
    :param states: what the model predicts for each point; none where it has no steady state
    """

    model: Model
    points: tuple[Point, ...]
    states: tuple[Steady | None, ...]

    def response_errors(self) -> list[float]:
        """Predicted over measured response time minus 1; infinite without a steady state."""
        return [
            math.inf if state is None else state.response_s / point.response_s - 1.0
            for point, state in zip(self.points, self.states, strict=True)
        ]

    def utilisation_error(self) -> float:
        """Largest difference between predicted and measured utilisation, NaN if not measured."""
        differences = [
            state.utilisation - point.utilisation
            for point, state in zip(self.points, self.states, strict=True)
            if state is not None and math.isfinite(point.utilisation)
        ]
        return max(differences, key=abs, default=math.nan)

    def verdict(self) -> str:
        """Where the model holds and where it fails, in a sentence."""
        errors = self.response_errors()
        name = self.model.name
        first_bad = next((k for k, error in enumerate(errors) if abs(error) > GOOD), None)
        if first_bad is None:
            worst = max(errors, key=abs)
            text = f"{name} holds over the whole sweep: response times within {abs(worst):.0%}"
        else:
            if first_bad == 0:
                text = f"{name} fails from the first point on"
            else:
                text = f"{name} holds to {GOOD:.0%} up to {_load(self.points[first_bad - 1])}"
            finite = [k for k, error in enumerate(errors) if math.isfinite(error)]
            worst_at = max(finite, key=lambda k: abs(math.log1p(errors[k])), default=None)
            if worst_at is not None and abs(errors[worst_at]) > GOOD:
                factor = 1.0 + errors[worst_at]
                text += (
                    f", predicts {factor:.2f} times the response at {_load(self.points[worst_at])}"
                )
            lost = [k for k, error in enumerate(errors) if not math.isfinite(error)]
            if lost:
                text += f", and has no steady state from {_load(self.points[lost[0]])} on"
        gap = self.utilisation_error()
        if math.isfinite(gap):
            text += f"; its utilisation is off by up to {100 * gap:+.0f} points"
        return text + "."


def _load(point: Point) -> str:
    if math.isfinite(point.offered):
        return f"{point.offered:,.0f}/s"
    return f"{point.in_flight:g} customers"


def compare(points: Sequence[Point], servers: int) -> list[Comparison]:
    """
    Fit the three models to a sweep and predict it with each.

    :param points: at least three below saturation
    :param servers: how many memcached can use at once: the fewer of threads and cores
    :raises ValueError: if there are too few points
    """
    ordered = tuple(sorted(points, key=lambda point: (point.offered, point.in_flight)))
    models: list[Model] = [fit_open(ordered, 1)]
    if servers > 1:
        models.append(fit_open(ordered, servers))
    models.append(fit_closed(ordered, servers))
    return [
        Comparison(model, ordered, tuple(model.predict(point) for point in ordered))
        for model in models
    ]


def bottleneck(utilisation: Mapping[str, float]) -> str:
    """
    Name the resource that limits throughput: the one with the highest utilisation.

    :param utilisation: of each resource, 0 to 1; unmeasured ones (NaN) are passed over
    :raises ValueError: if none was measured
    """
    known = {name: value for name, value in utilisation.items() if math.isfinite(value)}
    if not known:
        raise ValueError("no utilisation was measured")
    ranked = sorted(known.items(), key=lambda item: -item[1])
    name, value = ranked[0]
    others = ", ".join(f"{other} {share:.0%}" for other, share in ranked[1:])
    return f"{name}, {value:.0%} busy" + (f" ({others})" if others else "")
