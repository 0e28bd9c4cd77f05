"""
The state of one simulated machine: a control row (`env.control`) plus the world behind it.

All hosts of a batch live in one structured array, so that a host's state is one stretch of
memory and the kernel reads it by name.

An allocation comes into force in four stages, each with fields of its own (for memcached's vCPUs,
and for every job's state, vCPUs, weight and quota):

    desired_*  --regulator-->  service, state, cores, ...  --send-->  sent_*  --land-->  true_*
        ^                                                                                  |
        +------------ policy <---- observation <---- sensors <-----------------------------+

* Desired: `env.action` and `env.control` write what the policy wants, the regulator reads it.
* Regulated: `env.regulator` writes what it lets through, `env.simulator.sending` reads it. Threads
  end here, as a job is launched with them once and for all.
* Sent: `env.simulator.sending` writes what the actuator is busy with or has done, and reads it to
  send only what differs, and when it lands: at `service_lands_s`, `lands_s` and `move_lands_s`.
* True: `env.simulator.sending` writes what is in force, `env.simulator.rates` reads it. The kernel
  writes it where a job is done and where memcached completes the last interval alone.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from env.codes import DONE
from env.control import control_fields
from env.physics.parameters import COST_FIELDS, HOST_FIELDS, JOB_FIELDS, SERIAL_FRACTION, STRAGGLING
from env.physics.parameters import SMT as JOB_SMT
from env.physics.service import BATCH_SMT, CPU_LIMIT, EQUAL_SHARE, SERVICE_FIELDS
from env.physics.service import SMT as SERVICE_SMT
from env.reward import TERMS

MIXTURE = 12
"""How many different latency levels an interval keeps apart; more are merged with the nearest."""

TURNS = 3
"""A hiccup begins, ends, and what it left behind is served: what a sensor's window may reach."""


def host_dtype(n_jobs: int, n_vcpus: int) -> np.dtype:
    """
    The structured type of one simulated host.

    :param n_jobs: J, number of batch jobs
    :param n_vcpus: C, number of vCPUs
    """
    jobs, vcpus, whole, real = (n_jobs,), (n_vcpus,), "i8", "f8"
    fields = control_fields(n_jobs, n_vcpus)
    fields += [
        # The machine and its physics (a profile, or one draw from its uncertainty).
        ("batch_sibling", whole, vcpus),  # the pairing that the profile's job data show
        ("service_threads", whole),
        ("client_vcpu", whole),  # where load generator, loop and probe run, if they do here
        ("duration_s", real),
        ("service_params", real, (len(SERVICE_FIELDS),)),
        ("job_params", real, (n_jobs, len(JOB_FIELDS))),
        ("host_params", real, (len(HOST_FIELDS),)),
        ("cost_params", real, (len(COST_FIELDS),)),
        ("scatter_mean", real),  # of measured p95 around simulated ones
        ("scatter_spread", real),  # 0: not known
        ("docker_moves", whole),  # vCPUs, weights and quotas change by calls to Docker
        ("starts_ahead", whole),  # containers are made before their jobs' starts are decided
        ("random", whole, (2,)),
        # The load.
        ("interval", whole),
        ("interval_ends_s", real),
        ("load_qps", real),  # offered at the server now
        ("backlog", real),  # requests the clients are behind their schedule
        # Stalls and steals (`env.simulator.hiccups`).
        ("due_qps", real),  # by the clients' schedule, whether they stall or not
        ("hiccup", whole),  # STALL, STEAL, or 0
        ("hiccup_turns_s", real),  # when the next one begins, or this one ends; inf: there are none
        ("hiccup_s", real),  # length of the last one
        ("spell_turns_s", real),  # when a spell of steals begins, or ends; inf: there are none
        ("in_spell", whole),
        ("spell_steals_per_s", real),
        ("due_since_s", real),  # since when what came due in it has not been taken in
        ("held", real),  # requests that stalling clients will send
        ("counted", real),  # of the backlog: requests of a steal, whose latency is counted already
        ("turned_s", real, (TURNS,)),  # the last changes of rate that hiccups made, latest first
        ("turned_qps", real, (TURNS,)),  # and the rates before them
        ("turned_cpu", real, (TURNS,)),
        # What was sent to the actuator, when it lands (inf: nothing under way), what is in force.
        ("sent_service", whole),
        ("sent_state", whole, jobs),
        ("sent_cores", whole, jobs),
        ("sent_weight", whole, jobs),
        ("sent_quota", real, jobs),
        ("service_lands_s", real),
        ("lands_s", real, jobs),  # a start, pause or resume
        ("move_lands_s", real, jobs),  # a change of vCPUs, weight or quota
        ("api_free_s", real),
        ("ready_s", real, jobs),  # when the container of a job that arrived later is there
        ("true_service", whole),
        ("true_state", whole, jobs),
        ("true_cores", whole, jobs),
        ("true_weight", whole, jobs),
        ("true_quota", real, jobs),
        # The jobs.
        ("n_jobs", whole),  # the rest of the J are padding: done from the start
        ("count_jct", whole),  # 1: some jobs arrive later, so their completion times count
        ("arrival_s", real, jobs),
        ("next_arrival_s", real),  # inf: all are there
        ("overhead_left_s", real, jobs),
        ("work_left_s", real, jobs),
        ("start_s", real, jobs),
        ("end_s", real, jobs),
        ("paused_s", real, jobs),
        # Rates, valid until the next event.
        ("running", "u1", jobs),
        ("speed", real, jobs),
        ("used", real, (n_jobs, n_vcpus)),
        ("client", real, vcpus),  # share of each vCPU that the load generator takes
        ("occupancy", real, vcpus),
        ("background", real, vcpus),
        ("equal", real, vcpus),
        ("busy", real, vcpus),  # memcached's, all jobs' and the load generator's shares together
        ("wait", real),  # memcached's run-queue delay per CPU second
        ("p95_us", real),
        ("capacity_qps", real),
        ("service_cpu", real),
        ("rate_qps", real),  # served
        ("tail_shape", real),
        ("slow_fraction", real),  # of requests over the SLO
        # The measurement interval under way, and the requests of the one before it.
        ("sent_requests", real),
        ("slow_requests", real),
        ("mixing", whole),  # which of the two is under way
        ("mix_weight", real, (2, MIXTURE)),
        ("mix_p95", real, (2, MIXTURE)),
        ("mix_shape", real, (2, MIXTURE)),
        ("mix_count", whole, (2,)),
        # Counters a VM would have.
        ("requests", real),
        ("service_cpu_s", real),
        ("service_wait_s", real),
        ("vcpu_busy_s", real, vcpus),
        # What a latency probe and the CPU's event counters show a policy that asks for them.
        ("probe_runs", whole),  # the SLO guard asks whoever else does
        ("probe_window_s", real),  # 0: nobody asks
        ("probe_began_s", real),  # the window under way, and what it has seen
        ("probe_weight", real, (MIXTURE,)),
        ("probe_p95", real, (MIXTURE,)),
        ("probe_shape", real, (MIXTURE,)),
        ("probe_count", whole),
        ("probe_cpu_s", real),
        ("probe_stretched_s", real),
        ("stretch", real),  # cycles per instruction, relative to memcached alone
        ("probed_cpi", real),  # the reading; p95's is in the control row
        # The SLO guard.
        ("accounted_s", real),  # up to here it and the regulator have taken in what happened
        ("guard_at_s", real),  # the poll at which it may have to act; inf: at none
        # Waking a sleeping policy.
        ("decided_qps", real),  # the load that it has read at its last decision
        ("until_s", real),
        ("woken_s", real),  # first poll that something has asked for; recorders set it to inf
        ("quiet_until_s", real),  # until then nothing happens unless the policy acts
        ("wake_on_events", whole),
        ("recorded", whole),  # 1: a wait is cut where the SLO guard acts, for who records changes
        # The reward and the episode's figures.
        ("violated_s", real),  # to be expected, as `expected_violations`
        ("over_slo_s", real),
        ("intervals", whole),
        ("violations", whole),
        ("expected_violations", real),
        ("edits", whole),
        ("actuations", whole),
        ("pauses", whole, jobs),
        ("decisions", whole),
        ("term_sums", real, (len(TERMS),)),
    ]
    return np.dtype(fields, align=True)


def fill_padding(hosts: npt.NDArray[Any]) -> None:
    """
    Make every job one that is done from the start, and every vCPU one without a sibling.

    What a scenario has is written over it; the rest is room that nothing happens in.

    :param hosts: structured array[B] of zeros
    """
    for name in ("state", "desired_state", "sent_state", "true_state", "job_state"):
        hosts[name] = DONE
    for name in ("lands_s", "move_lands_s", "start_s"):
        hosts[name] = math.inf
    hosts["sibling"] = hosts["batch_sibling"] = -1
    hosts["job_work_s"] = 1.0


class HostFields:
    """
    One host's fields as attributes: arrays are views of its memory, scalars are read and set.

    What a record array does too, five times faster.

    :param hosts: structured array[B] of `host_dtype`, which must outlive this
    :param index: index of the host
    """

    _scalars: dict[str, npt.NDArray[Any]]

    def __init__(self, hosts: npt.NDArray[Any], index: int):
        names = hosts.dtype.names or ()
        vars(self)["_scalars"] = {
            name: hosts[name][index : index + 1] for name in names if not hosts.dtype[name].shape
        }
        vars(self).update({name: hosts[name][index] for name in names if name not in self._scalars})

    def __getattr__(self, name: str) -> Any:
        """A scalar field; arrays are ordinary attributes."""
        try:
            return self._scalars[name].item()
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field in the host's memory."""
        if name in self._scalars:
            self._scalars[name][0] = value
        else:
            vars(self)[name][:] = value


def keep_physical(host: Any) -> None:
    """
    Keep drawn parameters that are fractions from passing 1.

    :param host: host row
    """
    host["host_params"][STRAGGLING] = min(host["host_params"][STRAGGLING], 1.0)
    for field, most in ((SERIAL_FRACTION, 0.95), (JOB_SMT, 1.0)):
        host["job_params"][:, field] = host["job_params"][:, field].clip(max=most)
    service = host["service_params"]
    for field, most in (
        (SERVICE_SMT, 1.0),
        (BATCH_SMT, 1.0),
        (CPU_LIMIT, 1.0),
        (EQUAL_SHARE, 0.95),
    ):
        service[field] = min(service[field], most)
    host["cost_params"] = host["cost_params"].clip(max=1.0)
