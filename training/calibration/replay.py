"""
Logged runs, played in the simulator.

A log says when the load moved, what memcached and the jobs were given, and when jobs began and
ended. A log player puts that in force on a host of the simulator, where a policy, the regulator and
the actuator would; what follows from it is computed by the kernel's own functions.

Two replays of every run:

* *open*: jobs start when the log says and each meets the neighbours that the log gives it, for as
  long as the log says: the error of one job does not become its neighbour's. What a job has left at
  its logged end is done at its mean speed. Job durations (seconds not paused) and the p95 of every
  interval of the measured batch window are taken from this one.
* *closed*: each job starts at its predecessor's simulated end plus the logged gap. Moves and pauses
  stay on the clock; a job that outlives its logged allocation keeps the last one. The makespan is
  taken from this one.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from env.codes import BACKGROUND, DONE, NORMAL, PAUSED, PENDING, RUNNING, STEAL
from env.physics.backlog import served_qps
from env.physics.compiled import compiled, inlined
from env.physics.parameters import LAUNCH_OVERHEAD_S, WORK_S
from env.simulator.hiccups import note_rates, offer, turn_hiccup
from env.simulator.host import HostFields, host_dtype
from env.simulator.kernel import all_done, end_interval, finish_jobs, interval_p95
from env.simulator.rates import SOON_S, elapse, next_event, refresh
from env.simulator.sending import take_place, take_state
from training.calibration.logs.course import BATCH_SIBLINGS, JOBS, LOAD_LAG_S, SIBLINGS
from training.calibration.logs.traces import RunTrace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

CLOSE, LOAD, SERVICE, CORES, STATE, END, WEIGHT, QUOTA, FAIL, STOLEN = range(10)
"""Kinds of events; an interval closes before the load of the next one arrives."""

EVENT = np.dtype([("time_s", "f8"), ("kind", "i8"), ("job", "i8"), ("value", "f8")])


@dataclass(frozen=True)
class Physics:
    """
    Parameters that a run is played with.

    :param jobs: float64[len(JOBS), len(JOB_FIELDS)], one row per job of `JOBS`
    :param host: float64[len(HOST_FIELDS)]
    :param service: float64[len(SERVICE_FIELDS)], for the run's VM
    :param costs: float64[len(COST_FIELDS)]
    """

    jobs: FloatArray
    host: FloatArray
    service: FloatArray
    costs: FloatArray


@dataclass(frozen=True)
class Script:
    """
    A run as arrays: what happens when, and which job waits for which.

    :param events: `EVENT`[n], in the order in which they happen
    :param start_s: float64[J], when each job starts by the clock; inf where it waits for another
    :param predecessor: int64[J], the job that each one waits for, or -1
    :param gap_s: float64[J], how long after that one's end it starts
    """

    events: npt.NDArray[Any]
    start_s: FloatArray
    predecessor: IntArray
    gap_s: FloatArray


@dataclass(frozen=True)
class Replay:
    """
    What the physics made of a run.

    :param run_s: float64[J], seconds that each job ran without pauses
    :param end_s: float64[J], end of each job
    :param p95_us: float64[n_intervals], p95 of each interval [us]
    """

    run_s: FloatArray
    end_s: FloatArray
    p95_us: FloatArray


def replay(run: RunTrace, physics: Physics, closed: bool, load_lag_s: float = LOAD_LAG_S) -> Replay:
    """
    Play one run.

    :param run: its load, its allocations and what was measured
    :param physics: the parameters
    :param closed: start each job at its predecessor's simulated end plus the logged gap
    :param load_lag_s: how late the load changes against the log's intervals [s]
    """
    script = build_script(run, closed, load_lag_s)
    hosts = host_of(run, physics)
    host = HostFields(hosts, 0)
    host.lands_s = script.start_s
    run_s, p95_us = np.zeros(len(run.jobs)), np.zeros(len(run.qps))
    play(hosts, script.events, script.predecessor, script.gap_s, closed, run_s, p95_us)
    return Replay(run_s, hosts["end_s"][0].copy(), p95_us)


def build_script(run: RunTrace, closed: bool, load_lag_s: float) -> Script:
    """
    Turn a run into a script.

    :param run: the run
    :param closed: jobs wait for their predecessors, and the log does not end them
    :param load_lag_s: how late the load changes against the log's intervals [s]
    """
    begin_s = min(run.first_start_s, float(run.interval_start_s[0]))
    events = [(max(moved, begin_s), SERVICE, -1, float(mask)) for moved, mask in run.service_moves]
    for start, end, qps in zip(run.interval_start_s, run.interval_end_s, run.qps, strict=True):
        events += [(start + load_lag_s, LOAD, -1, qps), (end + load_lag_s, CLOSE, -1, 0.0)]
    events.append((run.interval_end_s[-1] + load_lag_s, LOAD, -1, 0.0))
    start_s = np.array([job.start_s for job in run.jobs])
    predecessor = np.full(len(run.jobs), -1)
    gap_s = np.zeros(len(run.jobs))
    for number, job in enumerate(run.jobs):
        events += [(moved, CORES, number, float(mask)) for moved, mask in job.moves[1:]]
        for paused, resumed in job.pauses:
            events += [(paused, STATE, number, PAUSED), (resumed, STATE, number, RUNNING)]
        before = run.predecessor(job)
        if not closed:
            events.append((job.end_s, END, number, 0.0))
        elif before is not None:
            start_s[number] = math.inf
            predecessor[number] = run.jobs.index(before)
            gap_s[number] = job.start_s - before.end_s
    # Moves at one time keep their order.
    events.sort(key=lambda event: (event[0], event[1] != CLOSE))
    return Script(np.array(events, EVENT), start_s, predecessor, gap_s)


def host_of(run: RunTrace, physics: Physics) -> npt.NDArray[Any]:
    """
    A host of the simulator before the run: no job has started.

    :param run: the run
    :param physics: the parameters
    :return: structured array[1] of `host_dtype`
    """
    hosts = np.zeros(1, host_dtype(len(run.jobs), len(SIBLINGS)))
    host = HostFields(hosts, 0)
    host.sibling, host.batch_sibling = SIBLINGS, BATCH_SIBLINGS
    host.service_params, host.host_params = physics.service, physics.host
    host.job_params = physics.jobs[[JOBS.index(job.name) for job in run.jobs]]
    host.cost_params = physics.costs
    host.client_vcpu = len(SIBLINGS) - 1
    host.service_threads = run.service_threads
    host.threads = [job.threads for job in run.jobs]
    host.true_state = PENDING
    host.sent_state = RUNNING  # from its start on, which the player decides
    host.sent_cores = [job.moves[0][1] for job in run.jobs]
    host.sent_weight = BACKGROUND if run.background else NORMAL
    host.sent_quota = [job.quota for job in run.jobs]
    host.work_left_s = host.job_params[:, WORK_S]
    host.start_s = host.end_s = math.inf
    # Only the player ends intervals and lets allocations land; the log has what hiccups there were,
    # and starts jobs when they came.
    host.interval_ends_s = host.service_lands_s = host.move_lands_s = math.inf
    host.hiccup_turns_s = host.next_arrival_s = math.inf
    return hosts


@compiled
def play(hosts, events, predecessor, gap_s, closed, run_s, p95_us):
    """
    Play a script on a host, from event to event, until nothing happens any more.

    :param hosts: structured array[1] of `host_dtype`; `lands_s` says when each job starts
    :param events: see `Script`
    :param predecessor: see `Script`
    :param gap_s: see `Script`
    :param closed: whether jobs end when their work is done, not when the log says
    :param run_s: float64[J], receives the seconds that each job ran without pauses
    :param p95_us: float64[n_intervals], receives the p95 of each interval [us]
    """
    h = hosts[0]
    event, interval = 0, 0
    h.now_s = events[0].time_s
    while event < events.shape[0] or not all_done(h):
        while event < events.shape[0] and events[event].time_s <= h.now_s + SOON_S:
            happens = events[event]
            if happens.kind == CLOSE:
                end_interval(h)
                p95_us[interval] = interval_p95(h)
                interval += 1
            elif happens.kind == END:
                _end_by_log(h, happens.job, run_s)
            elif happens.kind == STOLEN:
                begin_steal(h, happens.value)
            else:
                _put_in_force(h, happens.kind, happens.job, happens.value)
            event += 1
        if h.hiccup_turns_s <= h.now_s + SOON_S:
            turn_hiccup(h)
        _start_jobs(h)
        if event == events.shape[0]:
            _resume_all(h)
        refresh(h)
        next_s = next_event(h)
        if event < events.shape[0]:
            next_s = min(next_s, events[event].time_s)
        if next_s == math.inf:
            break
        elapse(h, max(next_s - h.now_s, 0.0))
        if finish_jobs(h):
            _follow_up(h, predecessor, gap_s, closed, run_s)


@compiled
def begin_steal(h, length_s):
    """
    The hypervisor takes all vCPUs away; whoever calls this refreshes the rates.

    :param h: host row, which plans no steals itself
    :param length_s: for how long, from now on [s]
    """
    if h.hiccup:  # one at a time
        return
    note_rates(h, served_qps(h.backlog, h.load_qps, h.capacity_qps))
    h.hiccup, h.hiccup_s = STEAL, length_s
    h.hiccup_turns_s = h.now_s + length_s
    h.due_since_s = h.now_s


@inlined
def _put_in_force(h, kind, job, value):
    """Load, vCPUs and states are what the log says, from now on."""
    if kind == LOAD:
        offer(h, value)
    elif kind == SERVICE:
        h.true_service = int(value)
    elif kind == STATE:
        h.sent_state[job] = int(value)
        if h.true_state[job] == RUNNING or h.true_state[job] == PAUSED:
            take_state(h, job)
    elif kind == FAIL:  # the next attempt begins anew
        h.true_state[job] = PENDING
        h.sent_state[job] = RUNNING
        h.work_left_s[job] = h.job_params[job, WORK_S]
        h.lands_s[job] = value
    else:
        if kind == CORES:
            h.sent_cores[job] = int(value)
        elif kind == WEIGHT:
            h.sent_weight[job] = int(value)
        else:
            h.sent_quota[job] = value
        if h.true_state[job] == RUNNING or h.true_state[job] == PAUSED:
            take_place(h, job)


@inlined
def _start_jobs(h):
    """Jobs whose time has come start, with what the log has given them by now."""
    for job in range(h.lands_s.shape[0]):
        if h.lands_s[job] <= h.now_s + SOON_S:
            h.lands_s[job] = math.inf
            take_state(h, job)


@inlined
def _resume_all(h):
    """A job that outlives its log and was last seen paused would never end."""
    for job in range(h.sent_state.shape[0]):
        h.sent_state[job] = RUNNING
        if h.true_state[job] == PAUSED:
            take_state(h, job)


@inlined
def _ran_s(h, job):
    """Seconds that a job has run without pauses."""
    return h.now_s - h.start_s[job] - h.paused_s[job]


@inlined
def _end_by_log(h, job, run_s):
    """A job makes room, as the log says; what it has left is done at its mean speed."""
    if h.end_s[job] == math.inf:
        so_far_s = _ran_s(h, job)
        done_s = h.job_params[job, WORK_S] - h.work_left_s[job]
        pace = done_s / max(so_far_s - h.job_params[job, LAUNCH_OVERHEAD_S], SOON_S)
        rest_s = h.overhead_left_s[job] + h.work_left_s[job] / max(pace, SOON_S)
        run_s[job] = so_far_s + rest_s
        h.end_s[job] = h.now_s + rest_s
    h.true_state[job] = DONE


@inlined
def _follow_up(h, predecessor, gap_s, closed, run_s):
    """
    Note the jobs that have just finished and say what follows from it.

    In a closed replay their successors start after the logged gap. In an open one they keep their
    vCPUs busy until the log ends them.
    """
    for job in range(run_s.shape[0]):
        if h.true_state[job] != DONE or h.end_s[job] != h.now_s:
            continue
        run_s[job] = _ran_s(h, job)
        if closed:
            for successor in range(run_s.shape[0]):
                if predecessor[successor] == job:
                    h.lands_s[successor] = h.now_s + gap_s[successor]
        else:
            h.true_state[job] = RUNNING
            h.work_left_s[job] = math.inf
