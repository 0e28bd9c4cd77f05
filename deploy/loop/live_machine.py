"""
The real machine, in the place of the simulated one: it shows telemetry and performs allocations.

Sensors are polled every period, as in the simulator. A policy that sleeps until something happens
is woken at the first poll after a job has ended, the load has moved or the SLO guard has changed
its level; a move is first confirmed by a short window that lies after it whole, so that the policy
sees the new load and not a mixture.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from deploy.linux.counters import CpiSensor
from deploy.linux.group_sensor import GroupSensor
from deploy.linux.sensors import Cpu, VcpuClock
from deploy.loop.actuator_interface import Actuation
from deploy.loop.admission import Arrivals
from deploy.records.latencies import Latencies, LatencySensor
from deploy.records.recorder import MEMCACHED, SCHEDULER, Recorder
from deploy.safety.guardian import Guardian
from env.allocation import Allocation, JobState, cores_of
from env.codes import PENDING
from env.control import PROBE_WINDOW_S, ControlState, carried_over, regulated, set_desired
from env.decision import decide_allocation, decide_edit, regulate_again
from env.guard import (
    LATE_LIMIT,
    LEVELS,
    budget,
    harmless,
    late_by_delay,
    note_late,
    note_stolen,
    step_guard,
)
from env.regulator import REASONS, note_use
from env.scenario import Job, Scenario, profile_work_s
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry

ANSWER_S = 0.002
"""How long a poll waits for memcached's counters; later ones are read in the next poll."""

CONFIRM_S = 0.006
"""Window over which a move of the load is confirmed."""

STALE_S = 0.5
"""Older readings are not decided by."""

PROBE_EVERY_S = 0.25

SLACK_UTILISATION, SLACK_WINDOW_S = 0.7, 0.5
"""memcached has CPU time to spare while it uses no more than this part of its vCPUs' time, measured
over a window of this length [s]."""

DELAY_CPU_S, DELAY_MEMORY, LEAST_CALM_DELAY, CALM_RISES_IN_S = 0.01, 0.05, 0.05, 600.0
"""Without a probe memcached's run delay is read once it has used so much CPU time [s]. Its calm
baseline is the least that a fading mean, in which a reading has this weight, came down to [s a CPU
second], and not below what means nothing; it rises by 1/e in this time [s], because a machine may
have become slower."""

STOLEN_EVERY_S = 0.095
"""Stolen time is read so often [s], and whenever requests are late: it matters for them alone."""

PREPARE_LIMIT_S = 30.0
"""How long the first decision waits at most for the jobs to be made. What is not made by then, as
memcached had no time to spare, is made beside the decisions."""

CALM_S = 0.2
"""Before the first decision no more requests than may be are late for so long [s]: a few polls, so
that what the making of the jobs disturbed last is not put down to the jobs."""

SAID_EVERY_S = 1.0
"""How often the same reasons for overruling a policy are written down: one that wishes something
else at every poll would fill the log, at real-time priority."""

AWAY_S = 0.4
"""After a gap like this the guardian may have changed things."""


class LiveMachine:
    """
    One real machine.

    :param scenario: the problem
    :param actuator: performs allocations
    :param sensor: memcached
    :param vcpus: busy time of the vCPUs
    :param recorder: is told what happens
    :param guardian: is kept from acting; None for a machine nothing is done to
    :param latency: measures latency, where it is measured
    :param cpi: counts memcached's cycles, for a policy that cannot decide without them
    :param admission: brings jobs one by one, where a queue or a cluster's node has them
    """

    def __init__(
        self,
        scenario: Scenario,
        actuator: Actuation,
        sensor: GroupSensor,
        vcpus: VcpuClock,
        recorder: Recorder,
        guardian: Guardian | None = None,
        latency: LatencySensor | None = None,
        cpi: CpiSensor | None = None,
        admission: Arrivals | None = None,
    ):
        self.scenario = scenario
        self.actuator = actuator
        self.sensor = sensor
        self.overruled = self.overruns = 0
        self._vcpus = vcpus
        self._recorder = recorder
        self._guardian = guardian
        self._latency = latency
        self._cpi = cpi
        self._admission = admission
        self._probe_window_s = PROBE_WINDOW_S
        self._probed_s = -math.inf
        self._probed: Latencies | None = None
        self._latency_stale = False
        self._started_s = actuator.state.started_s
        self._busy_before = vcpus.read()
        self._stolen_s = vcpus.stolen.read()
        self._row = ControlState.initial(scenario, profile_work_s(scenario.profile))
        self._stirred = -1  # how often the actuator had been when the jobs' states were read
        self._undecided: list[bool] = []  # which jobs waited for a decision then
        self._applied = regulated(self._row, scenario)
        self._decided_qps = self._decided_cpu = math.nan
        self._polled_s = self._stolen_at_s = self.now_s
        self._seen_cpu: Cpu | None = None  # up to here the run delay was read
        self._mean_delay = self._calm_delay = math.inf
        self._late_s = -math.inf  # when a poll last saw more requests late than may be
        self._slack = True
        self._slack_from: Cpu | None = None
        self._reasons = 0
        self._said_s: dict[int, float] = {}  # when which reasons were written down
        self._sent: tuple[object, ...] = ()
        # Applied again, this allocation would change nothing.
        self._settled: Allocation | None = None

    @property
    def now_s(self) -> float:
        """Seconds since the run started; setting the machine's clock does not change it."""
        return time.monotonic() - self._started_s

    @property
    def polled_s(self) -> float:
        """When the sensors were last read, seconds since the run started."""
        return self._polled_s

    @property
    def over(self) -> bool:
        """Whether all is done or given up and cleaned up."""
        if self._admission is not None:
            return self._admission.over
        runs = self.actuator.jobs.values()
        return all(run.state == JobState.DONE and not run.busy for run in runs)

    @property
    def applied(self) -> Allocation:
        """What was last sent to the actuator."""
        return self._applied

    @property
    def guard_level(self) -> int:
        """The SLO guard's level (`env.guard`), 0 while it lets the policy be."""
        return self._row.guard_level

    @property
    def guard_steps(self) -> int:
        """How many levels the SLO guard has climbed."""
        return self._row.guard_steps

    @property
    def guard_s(self) -> float:
        """How long the SLO guard was at a level above 0 [s]."""
        return self._row.guard_s

    @property
    def stale(self) -> str:
        """Why the telemetry cannot be decided by; empty if it can."""
        age_s = self.sensor.age_s(self.now_s)
        if age_s == math.inf:
            return "no reading yet"
        if age_s > STALE_S:
            return f"memcached's readings are {age_s:.1f} s old"
        bad_s = time.monotonic() - self._vcpus.bad_since_s
        if bad_s > STALE_S:
            return f"the vCPUs' readings make no sense for {bad_s:.1f} s"
        missing = self._cpi is not None and self._cpi.cpi is None
        return "memcached's cycles per instruction are not counted" if missing else ""

    def take_over(self) -> None:
        """Go on from what an earlier loop left running."""
        self.actuator.take_over(self.now_s)
        row = self._row
        for index, run in enumerate(self.actuator.jobs.values()):
            wanted = run.wanted
            if wanted.state not in (JobState.RUNNING, JobState.PAUSED):
                continue
            row.state[index] = row.desired_state[index] = int(wanted.state)
            row.threads[index] = row.desired_threads[index] = wanted.threads
            row.weight[index] = row.desired_weight[index] = int(wanted.weight)
            if wanted.cores:
                mask = sum(1 << core for core in wanted.cores)
                row.cores[index] = row.desired_cores[index] = mask
        self._applied = regulated(row, self.scenario)

    def prepare(self) -> Iterator[None]:
        """
        Have the jobs made before the first decision, so that a start only opens a gate.

        memcached overflows its refuge meanwhile, because the making of jobs disturbs it, and no job
        needs a vCPU yet. Then memcached has its refuge, and the first decision comes as soon as
        requests have been in time for `CALM_S`. The SLO guard begins with that decision: no job
        runs before that it could blame or acquit. Where a job has run already, as after a
        resumption, decisions come first, and what is not made yet is made beside them.

        :return: a step for each poll, until the jobs are made or `PREPARE_LIMIT_S` has passed, and
            then until requests are in time, an interval at most
        """
        runs = self.actuator.jobs.values()
        if any(run.state != JobState.PENDING for run in runs):
            return
        give_up_s = self.now_s + PREPARE_LIMIT_S
        self._hold(self._row.overflow)
        while self.now_s < give_up_s and not all(run.settled for run in runs):
            self.advance(self.now_s)
            yield
        self._hold(self._row.refuge)
        give_up_s = min(give_up_s, self.now_s + self._row.interval_s)
        while self.now_s < give_up_s and self._polled_s - self._late_s < CALM_S:
            self.advance(self.now_s)
            yield

    def _hold(self, mask: int) -> None:
        """Have memcached hold these vCPUs, a bit mask, while nobody decides and nothing guards."""
        self.apply(replace(self._applied, service_cores=cores_of(mask)))
        self._row.guarded = 0

    def watch(self, probe_window_s: float) -> None:
        """
        Prepare for a policy.

        :param probe_window_s: the window over which the policy wants latency and cycles measured
            [s]; 0 if the policy uses neither
        """
        self._probe_window_s = probe_window_s or PROBE_WINDOW_S

    def telemetry(self) -> Telemetry:
        """What the machine shows, as of the last poll."""
        sensor, cpu, requests = self.sensor, self.sensor.cpu, self.sensor.requests
        probed = self._latencies()
        busy = zip(self._vcpus.read(), self._busy_before, strict=True)
        return Telemetry(
            time_s=self._polled_s,
            service=ServiceTelemetry(
                requests=0.0 if requests is None else requests.count,
                cpu_s=0.0 if cpu is None else cpu.cpu_s,
                run_delay_s=0.0 if cpu is None else cpu.run_delay_s,
                qps=sensor.qps,
                cpu_cores=sensor.cpu_cores,
                peak_qps=self._row.peak_qps,
                peak_cpu_cores=self._row.peak_cpu_cores,
                p95_us=None if probed is None else probed.p95_us,
                cpi=None if self._cpi is None else self._cpi.cpi,
                wait_us=None if probed is None else probed.wait_us,
                service_us=None if probed is None else probed.service_us,
                members=() if probed is None else probed.members,
            ),
            vcpu_busy_s=tuple(now - before for now, before in busy),
            jobs={
                name: JobTelemetry(run.state, run.cpu_s())
                for name, run in self.actuator.jobs.items()
            },
            applied=self._applied,
            guard_level=self.guard_level,
        )

    def apply(self, allocation: Allocation, regulator_on: bool = True) -> None:
        """
        Regulate an allocation, and have what the regulator leaves of it actuated.

        :param allocation: what the policy desires
        :param regulator_on: False lets it through as it is
        """
        row = self._up_to_date()
        if allocation is not self._settled or not regulator_on:
            set_desired(row, allocation, self.scenario)
            level = row.guard_level
            decide_allocation(row, regulator_on)
            self._note_guard(level, "the regulator is off")
            self._send()
            self._settled = allocation if regulator_on and not row.overruled_reasons else None
        self._note_decided()

    def sense(self) -> ControlState:
        """The control row with all readings of the last poll, for whoever decides by edits."""
        row = self._up_to_date()
        probed = self._latencies()
        row.probed_p95_us = 0.0 if probed is None else probed.p95_us
        row.job_cpu_s = [run.cpu_s() for run in self.actuator.jobs.values()]
        return row

    def edit(self, rows: Any, edit: int) -> None:
        """
        Apply one edit, and have what the regulator leaves of it actuated.

        :param rows: int[n_edits, 7], see `env.action.EditTable`
        :param edit: index of the edit
        """
        row = self._up_to_date()
        self._settled = None
        if decide_edit(row, rows, edit):
            self._send()
        self._note_decided()

    def _up_to_date(self) -> ControlState:
        """The control row, with the time and the jobs' states as of the last poll."""
        row = self._row
        row.now_s, row.overruled = self._polled_s, 0
        row.qps, row.cpu_cores = self.sensor.qps, self.sensor.cpu_cores
        self._read_states()
        return row

    def _read_states(self) -> None:
        """Take over the jobs' states, if any may have changed."""
        if self.actuator.stirred == self._stirred:
            return
        self._stirred = self.actuator.stirred
        row, states = self._row, [run.state for run in self.actuator.jobs.values()]
        for index, state in enumerate(states):
            if state != row.job_state[index]:
                row.job_state[index] = int(state)
                self._unsettle()
            if state == PENDING and row.state[index] != PENDING:
                row.state[index] = PENDING  # a failed attempt, to be started again
                self._sent = ()
                self._unsettle()
        self._undecided = [state in (JobState.PENDING, JobState.DONE) for state in states]

    def _unsettle(self) -> None:
        """Forget what would change nothing: the jobs have changed."""
        self._settled, self._row.settled = None, 0

    def _send(self) -> None:
        """Have what the regulator left actuated, if it has changed."""
        row = self._row
        if row.overruled_reasons != self._reasons:
            self._note_overruled()
        self.overruled += row.overruled
        sent = _sent(row)
        if sent != self._sent:
            self._sent = sent
            self._applied = regulated(row, self.scenario)
            self.actuator.apply(self._applied)

    def _note_decided(self) -> None:
        """Remember the load that was decided by: a move from there wakes the policy."""
        self._decided_qps, self._decided_cpu = self.sensor.qps, self.sensor.cpu_cores

    def advance(self, until_s: float, wake: bool = False) -> None:
        """
        Poll until `until_s`, the policy's next turn.

        :param until_s: since the run started [s]
        :param wake: whether a job's end, a move of the load or a step of the guard ends the wait at
            the next poll
        """
        period_s = self.scenario.control.period_s
        self._read_states()  # what was decided last has changed them
        undecided, level = self._undecided, self.guard_level
        move_seen_s: float | None = None
        while True:
            due_s = self._due_s(period_s if move_seen_s is None else CONFIRM_S)
            while (left_s := due_s - self.now_s) > 0.0:
                self.actuator.wait(left_s)
            self.poll()
            news = self._undecided != undecided or self.guard_level != level
            if due_s >= until_s - 1e-4 or (wake and news):
                return
            moved_s = self._moved_s() if wake else None
            if move_seen_s is not None and moved_s is not None and moved_s > move_seen_s:
                return
            move_seen_s = moved_s

    def poll(self) -> None:
        """Read the sensors once and let the actuator go on."""
        now_s = self.now_s
        span_s, self._polled_s = now_s - self._polled_s, now_s
        if span_s > AWAY_S:
            self._recorder.event("custom", SCHEDULER, detail=f"away for {span_s:.2f} s")
            self.actuator.forget_written()
        self.sensor.ask(now_s)  # memcached answers while all else is done
        if self._guardian is not None:
            self._guardian.beat(now_s)
        self._poll_latency()
        if self.sensor.who:
            self.actuator.follow(self.sensor.who)
            if self._cpi is not None:
                self._cpi.poll(self.sensor.who, now_s, self._probe_window_s)
        self.actuator.poll(now_s, self._has_slack())
        self.sensor.receive(now_s, ANSWER_S)
        while self.sensor.news:
            self._recorder.event("custom", MEMCACHED, detail=self.sensor.news.popleft())
        if self._admission is not None and (jobs := self._admission.poll(now_s)) is not None:
            self._change_jobs(jobs)
        self._guard(span_s)

    def _change_jobs(self, jobs: tuple[Job, ...]) -> None:
        """Go on with other jobs; what is known of memcached, and of jobs that stay, stays known."""
        before, self.scenario = self.scenario, self.scenario.with_jobs(jobs)
        work_s = profile_work_s(self.scenario.profile)
        self._row = carried_over(self._row, before, self.scenario, work_s)
        self._applied, self._sent = regulated(self._row, self.scenario), ()
        self._stirred = -1
        self._unsettle()

    def _guard(self, span_s: float) -> None:
        """
        Show the regulator and the SLO guard what the poll has read, and do what the guard asks for.

        :param span_s: the time since the poll before [s]
        """
        row = self._up_to_date()
        note_use(row, row.qps, row.cpu_cores, span_s)
        share = self._late_share(span_s)
        if share or self._polled_s - self._stolen_at_s >= STOLEN_EVERY_S:
            self._note_stolen()
        if share is not None and share > LATE_LIMIT:
            self._late_s = self._polled_s
        if not row.guarded:
            return
        note_late(row, row.late_lately if share is None else share, span_s)
        level = row.guard_level
        gone, burn = budget(row, level >= harmless(row))
        if step_guard(row):
            late, spent = 100 * burn * LATE_LIMIT, 100 * gone
            self._note_guard(level, f"{late:.0f} % late just now, {spent:.0f} % of the budget gone")
            regulate_again(row)
            self._settled = None
            self._send()

    def _late_share(self, span_s: float) -> float | None:
        """The share of late requests since the poll before; None if there is none to tell by."""
        if self._latency is not None and not self._latency_stale:
            count, late = self._latency.late_lately(1e-6 * self.scenario.service.slo_us)
            return late / count if count else None
        now, before = self.sensor.cpu, self._seen_cpu
        if now is None or before is None:
            self._seen_cpu = now
            return None
        self._calm_delay *= math.exp(span_s / CALM_RISES_IN_S)
        if now.cpu_s - before.cpu_s < DELAY_CPU_S:
            return None
        delay = (now.run_delay_s - before.run_delay_s) / (now.cpu_s - before.cpu_s)
        self._seen_cpu = now
        if self._row.service & ~self._row.refuge:
            # On more vCPUs its threads wait less for one another: that is not the refuge's calm.
            return late_by_delay(delay, self._calm_delay)
        if self._mean_delay == math.inf:
            self._mean_delay = delay
        self._mean_delay += DELAY_MEMORY * (delay - self._mean_delay)
        self._calm_delay = max(min(self._calm_delay, self._mean_delay), LEAST_CALM_DELAY)
        return late_by_delay(delay, self._calm_delay)

    def _note_stolen(self) -> None:
        """Tell the guard what was stolen of memcached's vCPUs' time since it was told last."""
        before_s, span_s = self._stolen_s, self._polled_s - self._stolen_at_s
        self._stolen_s, self._stolen_at_s = self._vcpus.stolen.read(), self._polled_s
        held = cores_of(self._row.service)
        stolen_s = sum(self._stolen_s[vcpu] - before_s[vcpu] for vcpu in held)
        note_stolen(self._row, min(stolen_s / (len(held) * span_s), 1.0), span_s)

    def _has_slack(self) -> bool:
        """Whether memcached has CPU time to spare on its vCPUs."""
        now, before = self.sensor.cpu, self._slack_from
        if now is None or before is None:
            self._slack_from = now
        elif (window_s := now.time_s - before.time_s) >= SLACK_WINDOW_S:
            used = (now.cpu_s - before.cpu_s) / window_s
            self._slack = used <= SLACK_UTILISATION * len(self._applied.service_cores)
            self._slack_from = now
        return self._slack

    def _poll_latency(self) -> None:
        """Take in what the latency sensor has measured; say so where it says nothing any more."""
        if self._latency is None:
            return
        name, alive, was_stale = self._latency.name, self._latency.poll(), self._latency_stale
        self._latency_stale = alive and self._latency.stale
        if not alive:
            self._latency = None
        if not alive or self._latency_stale != was_stale:
            said = (
                "is silent" if self._latency_stale else "is heard again" if alive else "has ended"
            )
            self._recorder.event("custom", SCHEDULER, detail=f"the {name} {said}")

    def _latencies(self) -> Latencies | None:
        """What the latency sensor shows, worked out anew a few times a second."""
        if self._latency is None:
            return None
        if self._polled_s - self._probed_s >= PROBE_EVERY_S:
            self._probed_s = self._polled_s
            self._probed = self._latency.latencies(self._probe_window_s)
        return self._probed

    def _due_s(self, wait_s: float) -> float:
        """When the next poll is due; polls that were missed are left out."""
        due_s, now_s = self._polled_s + wait_s, self.now_s
        self.overruns += due_s < now_s
        return max(due_s, now_s)

    def _moved_s(self) -> float | None:
        """When the reading was taken by which the load has moved since the last decision, if so."""
        sensor, threshold = self.sensor, self.scenario.control.wake_qps
        requests, cpu = sensor.requests, sensor.cpu
        if requests is None or cpu is None:
            return None
        if cpu.time_s - requests.time_s <= self.scenario.control.period_s:
            return requests.time_s if abs(sensor.qps - self._decided_qps) > threshold else None
        # Without fresh counters the CPU time tells, at its price per request so far.
        price_s = cpu.cpu_s / max(1, requests.count)
        moved = abs(sensor.cpu_cores - self._decided_cpu) > threshold * price_s
        return cpu.time_s if moved and requests.count > 0 else None

    def _note_guard(self, before: int, why: str) -> None:
        """Record that the guard has changed its level, if it has."""
        level = self.guard_level
        if level != before:
            verb = "up" if level > before else "down"
            detail = f"guard {verb} to level {level}: {LEVELS[level]} ({why})"
            self._recorder.event("custom", SCHEDULER, detail=detail)

    def _note_overruled(self) -> None:
        """Record why the regulator overruled; called when the reasons have changed."""
        reasons = self._reasons = self._row.overruled_reasons
        if self._polled_s - self._said_s.get(reasons, -math.inf) < SAID_EVERY_S:
            return
        self._said_s[reasons] = self._polled_s
        words = "; ".join(text for flag, text in REASONS.items() if reasons & flag)
        if words:
            self._recorder.event("custom", SCHEDULER, detail=f"overruled: {words}")


def _sent(row: ControlState) -> tuple[object, ...]:
    """What of a control row goes to the actuator, to see whether it has changed."""
    jobs = (row.state, row.cores, row.weight, row.threads, row.quota)
    return row.service, *map(tuple, jobs)
