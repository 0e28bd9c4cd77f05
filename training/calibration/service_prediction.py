"""What the physics says of scans and intervals, by the very functions that the simulator calls."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from env.physics.backlog import backlog_after, served_qps, time_to_drain
from env.physics.compiled import allocating
from env.physics.service import IDLE_US, VM_SPEED, mixture_p95, service_state
from training.calibration.intervals import Intervals
from training.calibration.scans import Scans

FloatArray = npt.NDArray[np.float64]

STATES = 512
"""At most, in one interval."""


def predict_scans(
    scans: Scans,
    params: FloatArray,
    speed: FloatArray | None = None,
    idle: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """
    P95 [us] and capacity [1/s] at the points of scans, given factors per VM (1 if not).

    :param scans: n points of scans
    :param params: float64[len(SERVICE_FIELDS)]
    :param speed: float64[n_vms], speed factor of each VM; None means 1
    :param idle: float64[n_vms], idle-latency factor of each VM; None means 1
    :return: float64[n] each
    """
    ones = np.ones(len(scans.vm_names))
    p95 = np.empty(len(scans.qps))
    capacity = np.empty(len(scans.qps))
    _scan_curve(
        scans.vm,
        scans.threads,
        scans.cores,
        scans.qps,
        scans.siblings,
        np.zeros(len(scans.qps)) if scans.client is None else scans.client,
        ones if speed is None else speed,
        ones if idle is None else idle,
        params,
        p95,
        capacity,
    )
    return p95, capacity


def predict_intervals(
    intervals: Intervals, params: FloatArray, speed: FloatArray, idle: FloatArray
) -> FloatArray:
    """
    P95 of the intervals of runs [us], given factors per run.

    :param intervals: n intervals of runs
    :param params: float64[len(SERVICE_FIELDS)]
    :param speed: float64[n_vms], speed factor of each VM
    :param idle: float64[n_vms], idle-latency factor of each VM
    :return: float64[n]
    """
    p95 = np.empty(len(intervals.qps))
    _interval_p95(
        intervals.vm,
        intervals.run,
        intervals.qps,
        intervals.first,
        intervals.duration_s,
        intervals.mask,
        intervals.threads,
        intervals.background,
        intervals.equal,
        intervals.pressure,
        np.zeros(len(intervals.mask)) if intervals.client is None else intervals.client,
        intervals.siblings,
        speed,
        idle,
        params,
        p95,
    )
    return p95


def balanced_accuracy(
    p95: FloatArray, intervals: Intervals, chosen: npt.NDArray[np.bool_]
) -> float:
    """
    Mean of the hit rates on violating and on other intervals; 0 without one of them.

    :param p95: float64[n], predicted p95 [us]
    :param intervals: n measured intervals
    :param chosen: bool[n], the intervals that count
    """
    violated = (intervals.p95_us > intervals.slo_us)[chosen]
    predicted = (p95 > intervals.slo_us)[chosen]
    if violated.all() or not violated.any():
        return 0.0
    return float((predicted[violated].mean() + (~predicted)[~violated].mean()) / 2.0)


@allocating
def _scan_curve(vm, threads, cores, qps, siblings, client, speed, idle, params, p95, capacity):
    """Predict the points of scans; `p95` and `capacity` are filled."""
    params = params.copy()
    idle_us = params[IDLE_US]
    nobody = np.zeros(len(siblings))
    load_generator = np.zeros(len(siblings))  # it runs on the last vCPU
    for i in range(len(qps)):
        load_generator[len(siblings) - 1] = client[i]
        params[VM_SPEED] = speed[vm[i]]
        params[IDLE_US] = idle_us * idle[vm[i]]
        mask = (1 << cores[i]) - 1
        p95[i], capacity[i], _, _ = service_state(
            qps[i], threads[i], mask, siblings, nobody, nobody, load_generator, 0.0, params
        )


@allocating
def _interval_p95(
    vm,
    run,
    qps,
    first,
    duration,
    mask,
    threads,
    background,
    equal,
    pressure,
    client,
    siblings,
    speed,
    idle,
    params,
    p95,
):
    """Predict the p95 of the intervals of runs; `p95` is filled."""
    params = params.copy()
    idle_us = params[IDLE_US]
    weights = np.empty(STATES)
    latencies = np.empty(STATES)
    shapes = np.empty(STATES)
    load_generator = np.zeros(len(siblings))  # it runs on the last vCPU
    backlog = 0.0
    for i in range(len(qps)):
        if i > 0 and run[i] != run[i - 1]:
            backlog = 0.0
        params[VM_SPEED] = speed[vm[i]]
        params[IDLE_US] = idle_us * idle[vm[i]]
        n = 0
        for k in range(first[i], first[i + 1]):
            load_generator[len(siblings) - 1] = client[k]
            latency, capacity, _, shape = service_state(
                qps[i],
                threads[k],
                mask[k],
                siblings,
                background[k],
                equal[k],
                load_generator,
                pressure[k],
                params,
            )
            # Requests that waited at the client are served first: at capacity, at the plateau.
            drain = time_to_drain(backlog, qps[i], capacity)
            behind = min(drain, duration[k]) if drain < np.inf else 0.0
            if behind > 0.0 and n < STATES - 2:
                weights[n] = behind * served_qps(backlog, qps[i], capacity)
                latencies[n], _, _, shapes[n] = service_state(
                    capacity,
                    threads[k],
                    mask[k],
                    siblings,
                    background[k],
                    equal[k],
                    load_generator,
                    pressure[k],
                    params,
                )
                n += 1
            rest = duration[k] - behind
            if rest > 0.0 and n < STATES - 1:
                weights[n] = rest * served_qps(0.0, qps[i], capacity)
                latencies[n] = latency
                shapes[n] = shape
                n += 1
            backlog = backlog_after(backlog, qps[i], capacity, duration[k])
        p95[i] = mixture_p95(weights, latencies, shapes, n)
