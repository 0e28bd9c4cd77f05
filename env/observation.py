"""
The observation: fixed, documented scaling of what a control row holds.

There are no running statistics, which could be lost between training and deployment, and nothing
that a VM could not show. The layout, with J jobs and C vCPUs:

| features | content | scale |
|---|---|---|
| 1 | load [requests/s] | largest load of the scenario |
| 1 | memcached's CPU use [vCPUs] | C |
| 1 | memcached's CPU use per vCPU it holds | 1 |
| HISTORY | earlier loads, the latest first | as the load |
| 1 | time since the load moved, at most 20 s | 10 s |
| 1 | time between its last two moves, at most 20 s | 10 s |
| 1 | time since memcached's vCPUs grew, at most its dwell time | dwell time |
| 1 | time since the last decision, at most the hold time | hold time |
| 1 | last action changed nothing | 0 / 1 |
| 1 | a latency probe runs | 0 / 1 |
| 1 | probed p95, at most twice the SLO; 0 without a probe | SLO |
| 1 | the worst of its readings, fading by 1/e in `FADE_S`, at most twice the SLO | SLO |
| 1 | the worst of the readings while memcached held its refuge or more, fading | SLO |
| 1 | level of the SLO guard (`env.guard`) | its highest level |
| C | vCPU belongs to memcached | 0 / 1 |
| J x (7 + C) | job pending, running, paused, done (none of them: it has not arrived); | 0 / 1 |
| | CPU time over solo work, at most 2; | 1 |
| | threads; background weight; vCPU belongs to the job | C, 0 / 1 |
| n_edits | the action mask (`env.action.legal_edits`) | 0 / 1 |

The allocation shown is the regulated one: what was sent to the actuator, the last actions
included, because actions take effect late.
"""

from env.codes import BACKGROUND, DONE, NOT_ARRIVED, PAUSED, PENDING, RUNNING
from env.control import HISTORY, PROBE_WINDOW_S
from env.guard import PAUSED_ALL
from env.scenario import Scenario

VERSION = 3
"""Raise it whenever the layout or a scale changes: checkpoints of another version are refused."""

GLOBAL_FEATURES = 13 + HISTORY
JOB_FEATURES = 7
LONG_S = 10.0  # scale of the times since the load moved [s]
FADE_S = 600.0  # how long a bad reading of the probe is remembered [s]
WORST = 2.0  # largest p95 that is shown, as a multiple of the SLO


def feature_count(scenario: Scenario) -> int:
    """
    Number of features before the action mask.

    :param scenario: gives the numbers of jobs and vCPUs
    """
    return features_of(len(scenario.jobs), scenario.machine.vcpus)


def features_of(n_jobs: int, n_vcpus: int) -> int:
    """
    Number of features before the action mask, for any size.

    :param n_jobs: number of jobs J
    :param n_vcpus: number of vCPUs C
    """
    return GLOBAL_FEATURES + n_vcpus + n_jobs * (JOB_FEATURES + n_vcpus)


def remember(control):
    """
    Remember what the sensors have shown; to be called once a decision, before `observe`.

    :param control: a control row (`env.control`)
    """
    left = max(0.0, 1.0 - (control.now_s - control.decided_at_s) / FADE_S)
    control.worst_p95_us = max(control.probed_p95_us, control.worst_p95_us * left)
    control.refuge_p95_us *= left
    # Two windows of the probe, so that the reading covers nothing from before memcached grew.
    settled = control.now_s - control.grown_at_s > 2.0 * PROBE_WINDOW_S
    if settled and control.refuge & ~control.service == 0:
        control.refuge_p95_us = max(control.probed_p95_us, control.refuge_p95_us)
    if abs(control.qps - control.settled_qps) > control.wake_qps:
        control.settled_qps = control.qps
        control.load_gap_s = control.now_s - control.load_moved_at_s
        control.load_moved_at_s = control.now_s


def shift_history(control):
    """
    Append the load of this decision to the history; to be called once it was taken.

    :param control: a control row (`env.control`)
    """
    for age in range(len(control.past_qps) - 1, 0, -1):
        control.past_qps[age] = control.past_qps[age - 1]
    control.past_qps[0] = control.qps
    control.decided_at_s = control.now_s


def observe(control, n_vcpus, features):
    """
    Write the features of a control row.

    :param control: a control row (`env.control`) with up-to-date readings
    :param n_vcpus: C; an argument, so that the compiled kernel can pass a constant
    :param features: float[feature_count], receives the values
    """
    held = 0
    for vcpu in range(n_vcpus):
        held += (control.service >> vcpu) & 1
    features[0] = control.qps / control.qps_scale
    features[1] = control.cpu_cores / n_vcpus
    features[2] = control.cpu_cores / max(held, 1)
    at = 3
    for age in range(len(control.past_qps)):
        features[at] = control.past_qps[age] / control.qps_scale
        at += 1
    features[at] = min(control.now_s - control.load_moved_at_s, 2 * LONG_S) / LONG_S
    features[at + 1] = min(control.load_gap_s, 2 * LONG_S) / LONG_S
    features[at + 2] = (
        min(control.now_s - control.grown_at_s, control.service_dwell_s) / control.service_dwell_s
    )
    features[at + 3] = min(control.now_s - control.decided_at_s, control.hold_s) / control.hold_s
    features[at + 4] = control.kept
    features[at + 5] = 1.0 if control.probed_p95_us > 0.0 else 0.0
    features[at + 6] = min(control.probed_p95_us / control.slo_us, WORST)
    features[at + 7] = min(control.worst_p95_us / control.slo_us, WORST)
    features[at + 8] = min(control.refuge_p95_us / control.slo_us, WORST)
    features[at + 9] = control.guard_level / PAUSED_ALL
    at += 10
    for vcpu in range(n_vcpus):
        features[at] = (control.service >> vcpu) & 1
        at += 1
    for job in range(len(control.state)):
        state = control.state[job]
        if control.job_state[job] == DONE:
            state = DONE
        elif control.job_state[job] == NOT_ARRIVED:
            state = NOT_ARRIVED
        features[at] = 1.0 if state == PENDING else 0.0
        features[at + 1] = 1.0 if state == RUNNING else 0.0
        features[at + 2] = 1.0 if state == PAUSED else 0.0
        features[at + 3] = 1.0 if state == DONE else 0.0
        features[at + 4] = min(control.job_cpu_s[job] / control.job_work_s[job], 2.0)
        active = state == RUNNING or state == PAUSED
        features[at + 5] = control.threads[job] / n_vcpus if active else 0.0
        features[at + 6] = 1.0 if active and control.weight[job] == BACKGROUND else 0.0
        at += JOB_FEATURES
        for vcpu in range(n_vcpus):
            features[at] = (control.cores[job] >> vcpu) & 1 if active else 0.0
            at += 1
