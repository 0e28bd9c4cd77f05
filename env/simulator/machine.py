"""
The simulated machine: episodes on one host of the kernel, as policies and environments use it.

It plays both parts that a real machine plays: it shows telemetry and performs allocations.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from env.action import edit_table
from env.allocation import Allocation, JobState
from env.codes import NOT_ARRIVED
from env.control import PROBE_WINDOW_S, STATES, initial_values, regulated, set_desired
from env.errors import InputError
from env.family.drawing import is_drawn
from env.observation import features_of
from env.physics.parameters import (
    CORES_PER_THREAD,
    HOST_FIELDS,
    JOB_SPEED,
    LAUNCH_OVERHEAD_S,
    LOAD_LAG_HIGH_S,
    LOAD_LAG_LOW_S,
    SERIAL_FRACTION,
    STALLS_PER_S,
    WORK_S,
)
from env.physics.service import VM_SPEED
from env.reward import TERMS
from env.scenario import FAMILY_ROOM, Scenario
from env.simulator import kernel
from env.simulator.hiccups import SPELL_SHARES
from env.simulator.host import TURNS, HostFields, fill_padding, host_dtype, keep_physical
from env.simulator.load import interval_count, load_targets
from env.simulator.profile import Profile, load_profile, scatter
from env.simulator.random import FIRST_MODULUS, SECOND_MODULUS
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry

READINGS = (
    "now_s",
    # Telemetry of memcached, in its order.
    "requests",
    "service_cpu_s",
    "service_wait_s",
    "qps",
    "cpu_cores",
    "peak_qps",
    "peak_cpu_cores",
    "probe_window_s",
    "probed_p95_us",
    "probed_cpi",
    "guard_level",
)
"""The scalars that telemetry shows, read at once."""


COUNTS = (
    "violations",
    "intervals",
    "interval_s",
    "edits",
    "actuations",
    "overruled",
    "guard_steps",
    "guard_s",
    "illegal_edits",
    "decisions",
)
"""The scalars that an episode's figures show as they are."""

NO_END_S = 1e9
"""Work of a job without end [s alone on one vCPU]."""


@dataclass(frozen=True)
class Variation:
    """
    How episodes differ beyond their load trace.

    :param physics: scale of the profile's uncertainty that each episode's parameters are drawn
        from; 0 is the profile as fitted
    :param interval_s: range [s] that each episode's load interval is drawn from (log-uniform), or
        None for the scenario's own
    :param least_load: range of the factor on the load's minimum in each episode (log-uniform), or
        None for the scenario's own minimum; without effect where the scenario lists its targets
    :param most_load: the same for the load's maximum
    :param error: every parameter but the VM's speed is wrong by this fraction, each up or down at
        random
    :param error_share: in how many of the episodes
    :param unprobed: share of the episodes without a latency probe
    :param stolen: share of the episodes with spells of stolen time (`env.simulator.hiccups`)
    :param vm_speed: range that memcached's speed on the VM is drawn from (uniform), or None for
        the profile's
    """

    physics: float = 0.0
    interval_s: tuple[float, float] | None = None
    least_load: tuple[float, float] | None = None
    most_load: tuple[float, float] | None = None
    error: float = 0.0
    error_share: float = 1.0
    unprobed: float = 0.0
    stolen: float = 0.0
    vm_speed: tuple[float, float] | None = None


class EpisodeFactory:
    """
    Prepares hosts for new episodes of a scenario.

    :param scenario: the problem
    :param profile: fitted parameters; the scenario's own profile if none is given
    :param variation: how episodes differ
    :param room: numbers of jobs and vCPUs that a host has room for, so that one compiled kernel
        serves scenarios of all sizes up to it; if not given, `FAMILY_ROOM` for a drawn scenario,
        else what the scenario has
    :raises InputError: if the scenario has no room there
    """

    def __init__(
        self,
        scenario: Scenario,
        profile: Profile | None = None,
        variation: Variation | None = None,
        room: tuple[int, int] | None = None,
    ):
        self.scenario = scenario
        self.profile = profile or load_profile(scenario.profile)
        self.variation = variation or Variation()
        self.table = edit_table(scenario)
        own = len(scenario.jobs), scenario.machine.vcpus
        self.size = room or (FAMILY_ROOM if is_drawn(scenario.profile) else own)
        _check_room(self.size, scenario)
        self.observation_size = features_of(*self.size) + len(self.table)
        shortest, _ = self.variation.interval_s or (scenario.load.interval_s, 0.0)
        self.trace_length = interval_count(scenario.load.duration_s, shortest)
        self._spreads = [
            ("service_params", self.profile.service_spreads()),
            ("job_params", self.profile.job_spreads(scenario.job_names)),
            ("host_params", self.profile.host_spreads()[:STALLS_PER_S]),
        ]
        self._hiccup_spreads = self.profile.host_spreads()[STALLS_PER_S:]
        if self.profile.costs:
            self._spreads.append(("cost_params", self.profile.cost_spreads()))
        self._endless = np.array([job.endless for job in scenario.jobs])
        self._template = self._host_before_start()

    def new_hosts(self, count: int) -> npt.NDArray[Any]:
        """
        Memory for `count` hosts; `begin` fills it.

        :param count: B, the number of hosts
        """
        return np.zeros(count, dtype=self._template.dtype)

    def new_targets(self, count: int) -> npt.NDArray[np.float64]:
        """
        Memory for the load traces of `count` hosts.

        :param count: B, the number of hosts
        :return: float64[B, trace_length] [requests/s]
        """
        return np.zeros((count, self.trace_length))

    def begin(
        self,
        hosts: npt.NDArray[Any],
        targets: npt.NDArray[np.float64],
        index: int,
        trace_seed: int,
        rng: np.random.Generator,
    ) -> None:
        """
        Start an episode on one host.

        :param hosts: structured array[B]
        :param targets: float64[B, n_intervals], receives the trace [requests/s]
        :param index: index of the host
        :param trace_seed: seed of mcperf's load
        :param rng: source of everything else that is random in the episode
        """
        hosts[index] = self._template
        host = hosts[index]
        variation = self.variation
        if variation.interval_s is not None:
            host["interval_s"] = _log_uniform(variation.interval_s, rng)
        between = self._draw_range(rng)
        load = self.scenario.load
        count = interval_count(load.duration_s, float(host["interval_s"]))
        targets[index, :count] = load_targets(load, trace_seed, count, between)
        targets[index, count:] = targets[index, count - 1]
        host["interval_ends_s"] = host["interval_s"]
        host["random"] = (rng.integers(1, FIRST_MODULUS), rng.integers(1, SECOND_MODULUS))
        if variation.physics > 0.0:
            self._draw_physics(host, rng)
        if variation.unprobed > 0.0 and rng.random() < variation.unprobed:
            host["probe_runs"] = host["probe_window_s"] = 0
        if variation.error > 0.0 and rng.random() < variation.error_share:
            vm_speed = float(host["service_params"][VM_SPEED])
            for name, spreads in self._spreads:
                # Profiles without the last of the jobs' parameters draw what they always drew.
                values = host[name][:, : spreads.shape[1]] if name == "job_params" else host[name]
                up = rng.random(values.shape) < 0.5
                values *= np.where(up, 1.0 + variation.error, 1.0 - variation.error)
            host["service_params"][VM_SPEED] = vm_speed
            keep_physical(host)
        if variation.vm_speed is not None:
            host["service_params"][VM_SPEED] = rng.uniform(*variation.vm_speed)
        if variation.stolen > 0.0 and rng.random() < variation.stolen:
            kernel.begin_with_spells_at(hosts, index, _log_uniform(SPELL_SHARES, rng))
        n_jobs = len(self._endless)
        work_s = host["job_params"][:n_jobs, WORK_S]
        host["work_left_s"][:n_jobs] = np.where(self._endless, NO_END_S, work_s)
        kernel.start_episode_at(hosts, index, targets[index])

    def _draw_range(self, rng: np.random.Generator) -> tuple[int, int]:
        """The episode's smallest and largest load: the scenario's, or drawn around them."""
        load, variation = self.scenario.load, self.variation
        least, most = load.qps_min, load.qps_max
        if variation.most_load is not None:
            most = max(1, round(most * _log_uniform(variation.most_load, rng)))
        if variation.least_load is not None:
            least = max(1, round(least * _log_uniform(variation.least_load, rng)))
        return min(least, most), most

    def head_start(self, host: Any, rng: np.random.Generator) -> None:
        """
        Put a host somewhere into its episode: some jobs done already.

        Parallel environments that all begin at the beginning would show every update the same
        phase of the episode only.

        :param host: host row of an episode that has just begun
        :param rng: source of what is random
        """
        done = rng.permutation(len(self.scenario.jobs))[: rng.integers(len(self.scenario.jobs))]
        for name, value in (
            ("true_state", JobState.DONE),
            ("job_state", JobState.DONE),
            ("state", JobState.DONE),
            ("sent_state", JobState.DONE),
            ("work_left_s", 0.0),
            ("end_s", 0.0),
            ("job_cpu_s", host["job_work_s"][done]),
        ):
            host[name][done] = value

    def _host_before_start(self) -> Any:
        scenario, profile = self.scenario, self.profile
        machine, service, load = scenario.machine, scenario.service, scenario.load
        n_jobs = len(scenario.jobs)
        job_params = profile.job_array(scenario.job_names)
        host = np.zeros(1, dtype=host_dtype(*self.size))
        work = dict(zip(scenario.job_names, job_params[:, WORK_S], strict=True))
        values = initial_values(scenario, work)
        arrival_s = [job.arrival_s for job in scenario.jobs]
        states = [NOT_ARRIVED if at_s > 0.0 else JobState.PENDING for at_s in arrival_s]
        delays = scenario.delays.model_dump(exclude_none=True)
        known = zip(HOST_FIELDS, profile.host_array(), strict=True)
        host_params = np.array([delays.get(field, value) for field, value in known])
        paired = len(profile.siblings) == machine.vcpus
        values.update(
            batch_sibling=profile.siblings if paired else values["sibling"],
            service_threads=service.threads,
            client_vcpu=scenario.machine.vcpus - 1,
            duration_s=load.duration_s,
            docker_moves=scenario.delays.docker_moves,
            starts_ahead=scenario.delays.starts_ahead,
            service_params=profile.service_array(),
            job_params=job_params,
            host_params=host_params,
            cost_params=profile.cost_array(),
            scatter_mean=profile.scatter.mean if profile.scatter else 0.0,
            scatter_spread=profile.scatter.spread if profile.scatter else 0.0,
            sent_service=values["service"],
            sent_cores=values["cores"],
            sent_weight=values["weight"],
            sent_quota=values["quota"],
            service_lands_s=math.inf,
            lands_s=[math.inf] * n_jobs,
            move_lands_s=[math.inf] * n_jobs,
            true_service=values["service"],
            true_cores=values["cores"],
            true_weight=values["weight"],
            true_quota=values["quota"],
            turned_s=[-math.inf] * TURNS,
            stretch=1.0,
            probe_runs=1,
            probe_window_s=PROBE_WINDOW_S,
            guard_at_s=math.inf,
            spell_turns_s=math.inf,
            start_s=[math.inf] * n_jobs,
            end_s=[math.inf] * n_jobs,
            n_jobs=n_jobs,
            count_jct=scenario.has_arrivals,
            arrival_s=arrival_s,
            next_arrival_s=min((at_s for at_s in arrival_s if at_s > 0.0), default=math.inf),
            job_state=states,
            true_state=states,
            sent_state=values["state"],
        )
        fill_padding(host)
        for name, value in values.items():
            given = np.asarray(value)
            first: tuple[Any, ...] = (0, *map(slice, given.shape))
            host[name][first] = given
        return host[0]

    def _draw_physics(self, host: Any, rng: np.random.Generator) -> None:
        """Draw the episode's parameters from the profile's uncertainty."""
        scale = self.variation.physics
        for name, spreads in self._spreads:
            drawn = tuple(slice(length) for length in spreads.shape)
            scatter(host[name][drawn], scale * spreads, rng)
        speed = min(max(rng.standard_normal(), -2.0), 2.0)
        host["service_params"][VM_SPEED] = math.exp(scale * self.profile.vm_speed.spread * speed)
        # The load's clock is late, and with it every interval.
        lags_s = host["host_params"][[LOAD_LAG_LOW_S, LOAD_LAG_HIGH_S]]
        host["interval_ends_s"] += rng.uniform(*sorted(lags_s))
        # Last and only where there are any: profiles that lack them draw what they always drew.
        if self._hiccup_spreads.any():
            scatter(host["host_params"][STALLS_PER_S:], scale * self._hiccup_spreads, rng)
        if self.profile.siblings_unknown and rng.random() < 0.5:
            host["batch_sibling"] = host["sibling"]
        keep_physical(host)


def _check_room(room: tuple[int, int], scenario: Scenario) -> None:
    """Refuse a scenario that a host of another size cannot play."""
    jobs, vcpus = room
    for what, has, most in (
        ("machine.vcpus", scenario.machine.vcpus, vcpus),
        ("jobs", len(scenario.jobs), jobs),
    ):
        if has > most:
            raise InputError(f"scenario {scenario.name}: {what}: {has}; a host has room for {most}")


def _log_uniform(range_: tuple[float, float], rng: np.random.Generator) -> float:
    """A number from a range, uniform in its logarithm."""
    low, high = range_
    return math.exp(rng.uniform(math.log(low), math.log(high)))


class SimulatedMachine:
    """
    One simulated machine.

    :param factory: what its episodes look like
    """

    makes_load = True

    def __init__(self, factory: EpisodeFactory):
        self.factory = factory
        self.scenario = factory.scenario
        self._hosts = factory.new_hosts(1)
        self._targets: npt.NDArray[np.float64] = factory.new_targets(1)
        self._terms = np.zeros(len(TERMS))
        self.host: Any = HostFields(self._hosts, 0)
        self._names = self.scenario.job_names
        self._readings = self._hosts[list(READINGS)]
        fields: Any = self._hosts.dtype.fields
        # The allocation lies in between (`control_fields`).
        first, last = fields["service"][1], fields["grown_at_s"][1]
        self._applied_memory = self._hosts.view(np.uint8)[first:last]
        self._applied: tuple[bytes, Allocation] = (b"", Allocation(()))
        self._desired: Allocation | None = None

    def begin(self, trace_seed: int, rng: np.random.Generator) -> None:
        """
        Start an episode.

        :param trace_seed: seed of mcperf's load
        :param rng: source of everything else that is random
        """
        self._desired = None
        self._targets = self.factory.new_targets(1)
        self.factory.begin(self._hosts, self._targets, 0, trace_seed, rng)

    def follow(self, targets: npt.NDArray[np.float64]) -> None:
        """
        Replace the load trace of the episode that has just begun [requests/s].

        :param targets: float64[n_intervals], the load of each interval [requests/s]
        """
        self._targets = np.ascontiguousarray(targets, dtype=np.float64)[None, :]
        kernel.start_episode_at(self._hosts, 0, self._targets[0])

    def probe(self, window_s: float, runs: bool = True) -> None:
        """
        Show p95 and cycles per instruction as somebody wants them, until the episode ends.

        :param window_s: what a reading covers at least [s]; a slower reader's covers all since its
            last one. 0 shows nothing
        :param runs: whether the machine has a probe; if so the SLO guard asks it, shown or not
        """
        self.host.probe_runs = runs
        self.host.probe_window_s = window_s if runs else 0.0
        self.host.probed_p95_us = 0.0
        self.host.probe_began_s = self.host.now_s

    # --- for edit policies ---

    def step(self, edit: int, gamma: float) -> tuple[int, dict[str, float]]:
        """
        One decision of an edit policy.

        :param edit: index into the scenario's edits
        :param gamma: discount for the shaping term
        :return: 0, `TERMINATED` or `TRUNCATED`, and the reward terms
        """
        self._desired = None
        ended = kernel.step_at(
            self._hosts, 0, self.factory.table.rows, self._targets[0], edit, gamma, self._terms
        )
        return ended, dict(zip(TERMS, self._terms.tolist(), strict=True))

    def observe(self, row: npt.NDArray[np.float32]) -> None:
        """
        Write the observation, float32[observation_size].

        :param row: float32[observation_size], receives the observation
        """
        kernel.observe_at(self._hosts, 0, self.factory.table.rows, row)

    def close(self) -> None:
        """Nothing to undo."""

    # --- for policies that decide on whole allocations ---

    def telemetry(self) -> Telemetry:
        """What the machine shows now."""
        host = self.host
        time_s, *service, window_s, p95_us, cpi, level = self._readings.item(0)
        probed = (p95_us, cpi) if window_s > 0.0 else ()
        n_jobs, n_vcpus = len(self._names), self.scenario.machine.vcpus
        states, cpu_s = host.job_state[:n_jobs].tolist(), host.job_cpu_s[:n_jobs].tolist()
        return Telemetry(
            time_s,
            ServiceTelemetry(*service, *probed),
            tuple(host.vcpu_busy_s[:n_vcpus].tolist()),
            {
                name: JobTelemetry(STATES[state], used)
                for name, state, used in zip(self._names, states, cpu_s, strict=True)
            },
            self._in_force(),
            level,
        )

    def _in_force(self) -> Allocation:
        """What the regulator let through; made anew when it has changed only."""
        now = self._applied_memory.tobytes()
        if now != self._applied[0]:
            self._applied = (now, regulated(self.host, self.scenario))
        return self._applied[1]

    def apply(self, allocation: Allocation, regulator_on: bool = True) -> None:
        """
        Regulate an allocation, and send what the regulator leaves of it.

        :param allocation: what the policy desires
        :param regulator_on: False lets it through as it is
        :raises ValueError: if the machine cannot hold it
        """
        if allocation != self._desired:
            self._desired = allocation.validate(self.scenario)
            set_desired(self.host, allocation, self.scenario)
        kernel.apply_desired_at(self._hosts, 0, regulator_on)

    def advance(self, until_s: float, wake: bool = False) -> None:
        """
        Let time pass until `until_s`, the end of the episode at the latest, and sense.

        :param until_s: time of the policy's next decision [s]
        :param wake: whether a job's end, a move of the load, a hiccup that polls can see or a step
            of the SLO guard ends the wait at the next poll
        """
        self.pass_time(until_s, wake)
        self.sense()

    def pass_time(self, until_s: float, wake: bool = False) -> None:
        """
        A part of `advance`, which ends with `sense`: the policy sees nothing of where it is cut.

        :param until_s: see `advance`
        :param wake: see `advance`
        """
        kernel.advance_at(self._hosts, 0, self._targets[0], until_s, wake)

    def sense(self) -> None:
        """Read the sensors."""
        kernel.sense_at(self._hosts, 0)

    # --- how the episode stands ---

    @property
    def completed(self) -> bool:
        """Whether all jobs are done."""
        return all(state == JobState.DONE for state in self.host.true_state.tolist())

    @property
    def over(self) -> bool:
        """Whether the episode has ended, completed or cut off."""
        return bool(kernel.over_at(self._hosts, 0))

    @property
    def interval_p95_us(self) -> float:
        """95th percentile of latency in the last interval that ended [us]."""
        return float(kernel.interval_p95_at(self._hosts, 0))

    def summary(self) -> dict[str, Any]:
        """The episode's figures; see `episode_summary`."""
        return episode_summary(self._hosts[0], self.scenario)


def _moment(time_s: float) -> float | None:
    """A time, or None where it never came."""
    return time_s if math.isfinite(time_s) else None


def _alone_s(host: Any, scenario: Scenario) -> list[float]:
    """What each job takes alone on the machine with its most threads: Amdahl's law [s]."""
    params = host["job_params"][: len(scenario.jobs)]
    threads = np.array([max(job.threads) for job in scenario.jobs])
    wide = np.minimum(threads * params[:, CORES_PER_THREAD], scenario.machine.vcpus)
    serial = params[:, SERIAL_FRACTION]
    parallel = (1.0 - serial) * params[:, CORES_PER_THREAD]  # vCPU time, by as many as there are
    work_s = params[:, WORK_S] * (serial + parallel / wide)
    alone_s = params[:, LAUNCH_OVERHEAD_S] + work_s / host["host_params"][JOB_SPEED]
    return list(alone_s.tolist())


def episode_summary(host: Any, scenario: Scenario) -> dict[str, Any]:
    """
    The figures of an episode that has ended.

    An episode that was cut off counts the cap as its makespan.

    :param host: the host row
    :param scenario: gives the jobs their names
    """
    figures: dict[str, Any] = {name: host[name].item() for name in COUNTS}
    n_jobs = len(scenario.jobs)
    per_job_fields = ("paused_s", "pauses", "threads", "work_left_s")
    started, ended = host["start_s"][:n_jobs].tolist(), host["end_s"][:n_jobs].tolist()
    completed = all(state == JobState.DONE for state in host["true_state"].tolist())
    per_job = zip(
        scenario.jobs,
        _alone_s(host, scenario),
        started,
        ended,
        *(host[name][:n_jobs].tolist() for name in per_job_fields),
        strict=True,
    )
    return {
        "makespan_s": max(ended) - min(started) if completed else host["duration_s"].item(),
        "duration_s": host["duration_s"].item(),
        "completed": completed,
        "violation_ratio": figures["violations"] / max(1, figures["intervals"]),
        "expected_violation_ratio": host["expected_violations"].item()
        / max(1, figures["intervals"]),
        **figures,
        "reward_terms": dict(zip(TERMS, host["term_sums"].tolist(), strict=True)),
        "jobs": {
            job.name: {
                "arrival_s": job.arrival_s,
                "alone_s": alone_s,
                "start_s": _moment(start_s),
                "end_s": _moment(end_s),
                "paused_s": paused_s,
                "pauses": pauses,
                "threads": threads,
            }
            | ({"work_s": NO_END_S - left_s} if job.endless else {})
            for job, alone_s, start_s, end_s, paused_s, pauses, threads, left_s in per_job
        },
    }
