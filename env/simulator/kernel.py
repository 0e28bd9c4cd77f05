"""
One simulated host, one step at a time: the events that join load, service, jobs and control.

Between two events (the load moves, an actuation lands, a job ends, a backlog is gone, a hiccup
begins or ends, the SLO guard acts, the policy decides) every rate is constant, so a host is
advanced from event to event exactly, with no time step to choose. What holds between them is in
`env.simulator.rates`, how allocations come into force in `env.simulator.sending`, and what a policy
sees of it in `env.simulator.sensing`.

Every function takes a host row `h` (`env.simulator.host`) and is plain scalar Python; numba
compiles it, and `function.py_func` is the same code uncompiled.
"""

import math

from env import action, decision, observation, regulator, reward
from env.codes import DONE, NOT_ARRIVED, PENDING, RUNNING, TERMINATED, TRUNCATED
from env.physics.backlog import time_to_drain
from env.physics.compiled import callable_from_kernel, compiled, inlined
from env.physics.parameters import LAUNCH_OVERHEAD_S
from env.physics.service import mixture_p95
from env.simulator.guarding import guard_changes_level, next_guard_s
from env.simulator.hiccups import begin_with_spells, note_rates, offer, plan_hiccup, turn_hiccup
from env.simulator.rates import SOON_S, elapse, next_event, refresh
from env.simulator.scatter import scatter_growth, spreads_above, violation_chance
from env.simulator.sending import land_move, land_service, land_state, make_ahead, send
from env.simulator.sensing import read_jobs, read_use, sense

callable_from_kernel(
    action.open_edits,
    action.leaves_none,
    action.may_keep,
    action.can_serve,
    action.runs_job,
    action.is_legal,
    action.legal_edits,
    action.apply_edit,
    action.resolve_sets,
    decision.decide_edit,
    decision.decide_allocation,
    decision.regulate_again,
    observation.remember,
    observation.shift_history,
    observation.observe,
    regulator.overrule,
    regulator.regulate_service,
    regulator.regulate_jobs,
    regulator.hold_pause,
    regulator.place,
    regulator.pass_through,
    reward.time_term,
    reward.slo_term,
    reward.churn_term,
    reward.jct_term,
    reward.potential,
    reward.shaping_term,
    scatter_growth,
    spreads_above,
    violation_chance,
)

# An interval breaks the SLO when more than this fraction of its requests exceeds it.
SLOW_LIMIT = 0.05


# --- a decision -------------------------------------------------------------------------------


@compiled
def start_episode(h, targets):
    """
    Bring a freshly initialised host to its first decision.

    :param h: host row
    :param targets: float64[n_intervals], the load trace [requests/s]
    """
    plan_hiccup(h)
    offer(h, targets[0])
    h.settled_qps = h.decided_qps = h.load_qps
    refresh(h)
    sense(h)


@inlined
def step(h, rows, targets, edit, gamma, terms):
    """
    One decision of an edit policy: act, let time pass, sense, reward.

    :param h: host row
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param targets: float64[n_intervals], the load trace [requests/s]
    :param edit: index of the edit
    :param gamma: the trainer's discount, for the shaping term
    :param terms: float64[len(TERMS)], receives the reward terms (`env.reward.TERMS`)
    :return: 0, `TERMINATED` or `TRUNCATED`
    """
    before_s = h.now_s
    actuations = h.actuations
    potential = reward.potential(_work_left(h), h.n_vcpus)
    h.violated_s = 0.0
    h.over_slo_s = 0.0
    guarded = h.guarded
    if decision.decide_edit(h, rows, edit):
        send(h)
    _note_decided(h, guarded)
    h.edits += 1 - h.kept
    observation.shift_history(h)
    h.wake_on_events = 1
    advance(h, targets, h.now_s + (h.hold_s if h.kept else h.period_s))
    sense(h)
    observation.remember(h)
    ended = _how_ended(h)
    write_terms(h, terms, h.now_s - before_s, h.actuations - actuations, potential, gamma, ended)
    return ended


@compiled
def apply_desired(h, regulator_on):
    """
    Regulate the desired allocation and send what comes of it.

    :param h: host row
    :param regulator_on: whether the regulator stands in between
    """
    guarded = h.guarded
    decision.decide_allocation(h, regulator_on)
    send(h)
    _note_decided(h, guarded)
    h.decided_at_s = h.now_s


@compiled
def _note_decided(h, guarded):
    """Remember what was decided by; see when the guard acts where it was just turned on or off."""
    h.decisions += 1
    h.decided_qps = h.qps
    if h.guarded != guarded:
        h.guard_at_s = next_guard_s(h)
        h.quiet_until_s = h.now_s


@inlined
def observe(h, rows, row):
    """
    Write the observation of a host: features, then the action mask.

    :param h: host row
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param row: float32[n_features + n_edits], receives the observation
    """
    n_features = row.shape[0] - rows.shape[0]
    observation.observe(h, h.occupancy.shape[0], row[:n_features])
    action.legal_edits(h, rows, row[n_features:])


@inlined
def _work_left(h):
    """Solo-core seconds of work left, launch overheads included."""
    total = 0.0
    for job in range(h.work_left_s.shape[0]):
        total += h.work_left_s[job] + h.overhead_left_s[job]
        if h.true_state[job] == PENDING or h.true_state[job] == NOT_ARRIVED:
            total += h.job_params[job, LAUNCH_OVERHEAD_S]
    return total


@inlined
def _how_ended(h):
    """How the episode ended: `TERMINATED`, `TRUNCATED`, or 0 while it goes on."""
    if all_done(h):
        return TERMINATED
    return TRUNCATED if h.now_s >= h.duration_s - SOON_S else 0


@compiled
def present_s(h, since_s):
    """
    Seconds that jobs have been there unfinished, summed over them.

    :param h: host row
    :param since_s: what was before does not count [s]
    """
    total = 0.0
    for job in range(h.n_jobs):
        until_s = min(h.end_s[job], h.now_s)
        total += max(0.0, until_s - max(h.arrival_s[job], since_s))
    return total


@compiled
def all_done(h):
    """
    Whether every job has ended.

    :param h: host row
    """
    for job in range(h.true_state.shape[0]):
        if h.true_state[job] != DONE:
            return False
    return True


@inlined
def write_terms(h, terms, step_s, actuations, potential, gamma, ended):
    """
    Write the reward terms of a decision, and add them to the episode's.

    :param h: host row
    :param terms: float64[len(TERMS)], receives the terms (`env.reward.TERMS`)
    :param step_s: how much time passed [s]
    :param actuations: how many changes were sent
    :param potential: what the decision began with; an episode that has terminated has none left
    :param gamma: the trainer's discount, for the shaping term
    :param ended: see `_how_ended`
    """
    after = 0.0 if ended == TERMINATED else reward.potential(_work_left(h), h.n_vcpus)
    terms[0] = reward.time_term(step_s)
    terms[1] = reward.slo_term(h.violated_s, h.over_slo_s)
    terms[2] = reward.churn_term(1 - h.kept + actuations)
    terms[3] = reward.shaping_term(gamma, potential, after)
    terms[4] = reward.jct_term(present_s(h, h.now_s - step_s), h.n_jobs) if h.count_jct else 0.0
    for term in range(terms.shape[0]):
        h.term_sums[term] += terms[term]


# --- from event to event ----------------------------------------------------------------------


@compiled
def advance(h, targets, until_s):
    """
    Run the host until `until_s`, until a sleeping policy is woken, or until all jobs are done.

    When all are done the interval under way is completed, so that its p95 counts whole, but the
    clock of the episode stops at the last job's end.

    :param h: host row
    :param targets: float64[n_intervals], the load trace [requests/s]
    :param until_s: time of the episode to stop at [s]
    """
    h.until_s = min(until_s, h.duration_s)
    if h.now_s <= h.decided_at_s and h.turned_s[0] > h.now_s - h.period_s:
        _wake_if_moved(h)  # a hiccup's edge lay in the window that was decided by
    while h.now_s < h.until_s - SOON_S:
        if h.until_s < h.quiet_until_s:  # most steps: nothing happens
            elapse(h, h.until_s - h.now_s)
            break
        behind = h.backlog > 0.0
        elapse(h, max(min(h.until_s, next_event(h)), h.now_s) - h.now_s)
        changed = behind != (h.backlog > 0.0)
        moved = h.hiccup_turns_s < math.inf and behind and changed
        if moved:  # what a hiccup left behind is served, and the rates are still those of that
            note_rates(h, h.capacity_qps)
        if h.hiccup_turns_s <= h.now_s + SOON_S:
            turn_hiccup(h)
            changed = moved = True
        changed |= finish_jobs(h)
        if h.service_lands_s <= h.now_s + SOON_S:
            land_service(h)
            changed = True
        for job in range(h.lands_s.shape[0]):
            if h.lands_s[job] <= h.now_s + SOON_S:
                land_state(h, job)
                changed = True
            if h.move_lands_s[job] <= h.now_s + SOON_S:
                land_move(h, job)
                changed = True
        if h.interval_ends_s <= h.now_s + SOON_S:
            end_interval(h)
            _begin_interval(h, targets)
            changed = moved = True
        if h.next_arrival_s <= h.now_s + SOON_S:
            let_arrive(h)
            changed = True
        if h.guard_at_s <= h.now_s + SOON_S:
            _guard(h)
            changed = True
        if changed:
            refresh(h)
        if moved:
            _wake_if_moved(h)
        if all_done(h):
            _complete_interval(h)
            return
    if h.now_s >= h.duration_s - SOON_S and h.sent_requests > 0.0:
        end_interval(h)  # cut short by the time cap; it counts as far as it came


@compiled
def _guard(h):
    """The SLO guard's poll: what it changes is regulated and sent, whoever decides next."""
    read_jobs(h)
    if guard_changes_level(h):
        read_use(h)
        decision.regulate_again(h)
        send(h)
        wake(h, h.now_s)
        if h.recorded:
            h.until_s = h.now_s


@compiled
def _begin_interval(h, targets):
    """Move the load to its next target."""
    h.interval += 1
    offer(h, targets[min(h.interval, targets.shape[0] - 1)])
    h.interval_ends_s += h.interval_s


@compiled
def _wake_if_moved(h):
    """
    Wake a sleeping policy if what is served is not what it decided by, for a polling window more.

    It wakes at the first poll whose whole window shows the new load. A shorter burst or stall
    is over by then, and its end is no news to who has not seen it.
    """
    lasts_s = time_to_drain(h.backlog, h.load_qps, h.capacity_qps)
    if h.hiccup:
        lasts_s = h.hiccup_turns_s - h.now_s
    if abs(h.rate_qps - h.decided_qps) > h.wake_qps and lasts_s >= h.period_s:
        wake(h, h.now_s + h.period_s)


@compiled
def end_interval(h):
    """
    Close the measurement interval: it counts when it overlaps the batch window.

    The verdict is the simulator's; what the reward charges is how probable a violation is where p95
    scatter as they were measured. Where that is not known, the verdict is all there is.

    :param h: host row
    """
    started = False
    for job in range(h.start_s.shape[0]):
        started |= h.start_s[job] <= h.interval_ends_s
    if started:
        h.intervals += 1
        violated = h.slow_requests > SLOW_LIMIT * h.sent_requests
        chance = 1.0 * violated
        if h.scatter_spread > 0.0:
            p95_us = _mixed_p95(h, h.mixing)
            chance = violation_chance(p95_us, h.slo_us, h.scatter_mean, h.scatter_spread)
        h.violations += violated
        h.expected_violations += chance
        h.violated_s += chance * h.interval_s
    h.sent_requests = 0.0
    h.slow_requests = 0.0
    h.mixing = 1 - h.mixing
    h.mix_count[h.mixing] = 0


@compiled
def _complete_interval(h):
    """
    Serve the rest of the last interval without batch work.

    The schedule is over: beside what memcached holds, it gets back the refuge it began with. What
    the sensors show, and what guard and regulator know, ends with the last job.
    """
    ended_s = h.now_s
    sense(h)
    h.guarded = 0
    h.true_service |= h.refuge
    refresh(h)
    while h.now_s < h.interval_ends_s - SOON_S:
        drained_s = time_to_drain(h.backlog, h.load_qps, h.capacity_qps)
        elapse(h, min(h.interval_ends_s - h.now_s, drained_s, h.hiccup_turns_s - h.now_s))
        if h.hiccup_turns_s <= h.now_s + SOON_S:
            turn_hiccup(h)
        refresh(h)
    end_interval(h)
    h.now_s = ended_s


@compiled
def interval_p95(h):
    """
    95th percentile of latency in the last interval that ended [us].

    Only recordings ask for it, so its requests are kept until the next interval has ended, too.

    :param h: host row
    """
    return _mixed_p95(h, 1 - h.mixing)


@inlined
def _mixed_p95(h, at):
    """95th percentile of latency in one of the two intervals that are kept [us]."""
    return mixture_p95(h.mix_weight[at], h.mix_p95[at], h.mix_shape[at], h.mix_count[at])


@compiled
def finish_jobs(h):
    """
    Mark the jobs whose work is done; True if there are any. The next poll shows it.

    :param h: host row
    """
    any_done = False
    for job in range(h.work_left_s.shape[0]):
        if (
            h.true_state[job] == RUNNING
            and h.overhead_left_s[job] <= SOON_S
            and h.work_left_s[job] <= SOON_S * max(1.0, h.speed[job])
        ):
            h.true_state[job] = DONE
            h.work_left_s[job] = 0.0
            h.end_s[job] = h.now_s
            h.settled = 0
            h.lands_s[job] = math.inf
            h.move_lands_s[job] = math.inf
            wake(h, h.now_s)
            any_done = True
    return any_done


@compiled
def let_arrive(h):
    """
    Jobs arrive: the next poll shows them, and their containers are made ahead.

    :param h: host row
    """
    h.next_arrival_s = math.inf
    for job in range(h.true_state.shape[0]):
        if h.true_state[job] != NOT_ARRIVED:
            continue
        if h.arrival_s[job] <= h.now_s + SOON_S:
            h.true_state[job] = PENDING
            h.settled = 0
            wake(h, h.now_s)
        else:
            h.next_arrival_s = min(h.next_arrival_s, h.arrival_s[job])
    make_ahead(h)


@compiled
def wake(h, earliest_s):
    """
    End a sleeping policy's step at the first poll that is not before `earliest_s`.

    :param h: host row
    :param earliest_s: time of the episode before which the step does not end [s]
    """
    if h.wake_on_events:
        polls = math.ceil((earliest_s - h.decided_at_s) / h.period_s - 1e-6)
        poll_s = h.decided_at_s + polls * h.period_s
        h.until_s = min(h.until_s, poll_s)
        h.woken_s = min(h.woken_s, poll_s)


# --- for Python: an array and an index, as a record by itself costs 27 us a call ----------------


@compiled
def start_episode_at(hosts, b, targets):
    """See `start_episode`; of host b."""
    start_episode(hosts[b], targets)


@compiled
def begin_with_spells_at(hosts, b, share):
    """See `begin_with_spells`; on host b."""
    begin_with_spells(hosts[b], share)


@compiled
def step_at(hosts, b, rows, targets, edit, gamma, terms):
    """See `step`; of host b."""
    return step(hosts[b], rows, targets, edit, gamma, terms)


@compiled
def observe_at(hosts, b, rows, row):
    """See `observe`; of host b."""
    observe(hosts[b], rows, row)


@compiled
def apply_desired_at(hosts, b, regulator_on):
    """See `apply_desired`; on host b."""
    apply_desired(hosts[b], regulator_on)


@compiled
def advance_at(hosts, b, targets, until_s, wake_on_events):
    """
    `advance` of host b.

    :param hosts: structured array[B]
    :param b: index of the host
    :param targets: float64[n_intervals], the load trace [requests/s]
    :param until_s: time of the episode to stop at [s]
    :param wake_on_events: whether what a policy waits for ends the advance early
    """
    h = hosts[b]
    h.wake_on_events = wake_on_events
    advance(h, targets, until_s)


@compiled
def sense_at(hosts, b):
    """See `env.simulator.sensing.sense`; on host b."""
    sense(hosts[b])


@compiled
def interval_p95_at(hosts, b):
    """See `interval_p95`; of host b."""
    return interval_p95(hosts[b])


@compiled
def over_at(hosts, b):
    """
    Whether the episode of host b has ended, completed or cut off.

    :param hosts: structured array[B]
    :param b: index of the host
    """
    return _how_ended(hosts[b]) != 0


@compiled
def step_batch(hosts, rows, targets, edits, gamma, terms, rewards, ended, observations):
    """
    One decision on each of B hosts; the hosts are independent.

    :param hosts: structured array[B]
    :param rows: int64[n_edits, 7]
    :param targets: float64[B, n_intervals]
    :param edits: int64[B], index of each host's edit
    :param gamma: discount for the shaping term
    :param terms: float64[B, len(TERMS)], receives the reward terms
    :param rewards: float32[B], receives their sums
    :param ended: int64[B], receives 0, `TERMINATED` or `TRUNCATED`
    :param observations: float32[B, n_features + n_edits]
    """
    for b in range(hosts.shape[0]):
        ended[b] = step(hosts[b], rows, targets[b], edits[b], gamma, terms[b])
        rewards[b] = terms[b].sum()
        observe(hosts[b], rows, observations[b])
