"""
The reward of one decision, in named terms. One unit is `UNIT_S` seconds of makespan.

- `time`: minus the seconds that passed.
- `slo`: minus the time cost of breaking the SLO: `VIOLATION_WEIGHT` times the length of each
  interval, when it ends, times the probability that it broke it (in the simulator that of a machine
  whose p95 scatter as the profile says, so that staying just below the SLO is not safe), and
  `SEVERITY_WEIGHT` times the time's worth of requests over the SLO as they occur, so that an
  interval already lost is not free to sacrifice.
- `jct`: minus the seconds that jobs which are there and not done have waited or run, divided by the
  number of all jobs, so that an episode costs their mean job completion time. Only where jobs
  arrive during the episode: where all are there from the start, what counts is the makespan.
- `churn`: minus `CHANGE_COST_S` for each edit and for each change that is actuated, so that of two
  equally fast schedules the calmer one wins, and edits are not made for their own sake.
- `shaping`: potential-based, gamma Phi(s') - Phi(s) (Ng, Harada, Russell 1999), which leaves the
  best policy what it is. Phi is minus the time the remaining work would take at a fixed rate;
  it is 0 once all jobs are done, but not when an episode is cut off.
"""

UNIT_S = 10.0
VIOLATION_WEIGHT = 3.0
SEVERITY_WEIGHT = 3.0
CHANGE_COST_S = 0.05

WORK_RATE_PER_VCPU = 0.5
"""The rate that Phi assumes [solo-core seconds of work per vCPU and second]; SMT costs the rest."""

TERMS = ("time", "slo", "churn", "shaping", "jct")


def time_term(elapsed_s):
    """
    Cost of time.

    :param elapsed_s: seconds since the last decision
    """
    return -elapsed_s / UNIT_S


def slo_term(violated_s, over_slo_s):
    """
    Cost of breaking the SLO.

    :param violated_s: length of the intervals that ended, times their probability of violating [s]
    :param over_slo_s: integral over time of the fraction of requests over the SLO [s]
    """
    return -(VIOLATION_WEIGHT * violated_s + SEVERITY_WEIGHT * over_slo_s) / UNIT_S


def churn_term(changes):
    """
    Cost of edits and actuations.

    :param changes: how many there were
    """
    return -CHANGE_COST_S * changes / UNIT_S


def potential(work_left_s, n_vcpus):
    """
    Phi of a state that is not terminal.

    :param work_left_s: solo-core seconds of work left in all jobs
    :param n_vcpus: vCPUs of the machine
    """
    return -work_left_s / (WORK_RATE_PER_VCPU * n_vcpus) / UNIT_S


def shaping_term(gamma, potential_before, potential_after):
    """
    The shaping reward, gamma Phi(s') - Phi(s).

    :param gamma: the trainer's discount
    :param potential_before: Phi(s) [`UNIT_S`]
    :param potential_after: Phi(s') [`UNIT_S`]
    """
    return gamma * potential_after - potential_before


def jct_term(present_s, n_jobs):
    """
    Cost of jobs' time from their arrival to their end.

    :param present_s: seconds that jobs have been there unfinished, summed over them
    :param n_jobs: number of all jobs, those that have not arrived included
    """
    return -present_s / n_jobs / UNIT_S
