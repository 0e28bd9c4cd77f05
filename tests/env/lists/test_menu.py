"""What a list of the menu does on a machine: side by side, in front, and when memcached grows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from env.action import edit_table
from env.allocation import mask_of
from env.codes import BACKGROUND, DONE, KEEP, NORMAL, PAUSED, PENDING, RUNNING, SERVICE, START
from env.guard import PAUSED_ALL
from env.lists.following import RELEASE, UNPROBED, list_edit, service_edit
from env.lists.list_kernel import follow_batch
from env.lists.menu import (
    AT_ONCE,
    FRONT,
    LIST_SERVED,
    LISTS,
    MENU,
    SERVED,
    SHARES,
    list_table,
    plain_list,
)
from env.reward import TERMS
from env.scenario import MAX_JOBS, Scenario, load_scenario
from env.simulator.kernel import step_at
from env.simulator.machine import EpisodeFactory

SHARING = load_scenario("family-report-77-34")  # 8 jobs on 4 vCPUs, some of them memcached's
LONGEST = 5000


def begun(scenario: Scenario) -> tuple[np.ndarray, np.ndarray]:
    """A machine at the start of an episode, and its load."""
    factory = EpisodeFactory(scenario)
    hosts, targets = factory.new_hosts(1), factory.new_targets(1)
    factory.begin(hosts, targets, 0, 5, np.random.default_rng(5))
    return hosts, targets


def played(
    scenario: Scenario, at_once: int, front: int, served: float = 0.0, interrupts: bool = False
) -> Iterator[np.ndarray]:
    """The host after each edit of a list that is followed by the plain functions."""
    edits = edit_table(scenario)
    table, n_jobs = list_table(scenario, edits), len(scenario.jobs)
    hosts, targets = begun(scenario)
    terms = np.zeros(len(TERMS))
    for _ in range(LONGEST):
        edit = list_edit(
            hosts.view(np.recarray)[0], n_jobs, edits.rows, table.starts, table.places,
            table.pauses, table.sets, table.usual, at_once, front, len(SHARES) - 1, served,
            interrupts,
        )  # fmt: skip
        ended = step_at(hosts, 0, edits.rows, targets[0], edit, 1.0, terms)
        yield hosts[0]
        if ended:
            return


def number_of(at_once: int, front: int, share: float, served: float) -> int:
    """The index of a list by what it says."""
    answers = (
        AT_ONCE.index(at_once),
        FRONT.index(front),
        SHARES.index(share),
        SERVED.index(served),
    )
    return MENU.tolist().index(list(answers))


def test_the_menu_says_what_its_parts_say() -> None:
    one = number_of(4, 1, 0.5, 0.7)
    assert LISTS[one].tolist() == [4, 1, SHARES.index(0.5)]
    assert LIST_SERVED[one] == 0.7
    assert len(np.unique(MENU, axis=0)) == len(MENU) == len(LISTS)


@pytest.mark.parametrize("name", ["cca-2025", "cca-2025-exclusive", "local", "family-report-1-15"])
def test_a_scenario_has_the_edits_that_lists_need(name: str) -> None:
    scenario = load_scenario(name)
    edits = edit_table(scenario)
    table = list_table(scenario, edits)
    for job, known in enumerate(scenario.jobs):
        for share, edit in zip(SHARES, table.starts[job].tolist(), strict=True):
            kind, owner, _, _, threads = edits[edit]
            assert (kind, owner) == (START, job)
            assert threads in known.threads
            most = max(1, round(share * scenario.machine.vcpus))
            assert threads <= max(most, min(known.threads))
        assert table.places[job, NORMAL] != KEEP
    sharing = scenario.regulation.share_service_cores
    assert (table.places[:, BACKGROUND] != KEEP).all() == sharing
    for cores, (mask, size, edit) in zip(scenario.service.sets, table.sets.tolist(), strict=True):
        assert (mask, size) == (mask_of(cores), len(cores))
        assert edits[edit][:3] == (SERVICE, 0, mask)
    assert table.legal[plain_list(scenario)]
    in_front = LISTS[table.legal, 1]
    assert (in_front == MAX_JOBS).all() != sharing


def test_who_is_in_front_has_normal_weight_and_the_others_fill_the_background() -> None:
    ended_s = []
    for front in (0, 1, MAX_JOBS):
        most_running = most_normal = 0
        for host in played(SHARING, 3, front):
            running = host["state"] == RUNNING
            most_running = max(most_running, int(running.sum()))
            most_normal = max(most_normal, int((running & (host["weight"] == NORMAL)).sum()))
        assert (most_running, most_normal) == (3, min(front, 3))
        assert (host["true_state"] == DONE).all()
        ended_s.append(float(host["now_s"]))
    assert len(set(ended_s)) == 3


def test_a_start_that_the_guard_holds_back_is_asked_for_once() -> None:
    edits = edit_table(SHARING)
    table, n_jobs = list_table(SHARING, edits), len(SHARING.jobs)
    hosts, _ = begun(SHARING)
    host = hosts.view(np.recarray)[0]
    host.guard_level, asked = PAUSED_ALL, []
    for _ in range(6):
        edit = list_edit(
            host, n_jobs, edits.rows, table.starts, table.places, table.pauses, table.sets,
            table.usual, 3, 0, len(SHARES) - 1, 0.0, False,
        )  # fmt: skip
        asked.append(edits[edit])
        if edits[edit].kind == START:
            host.desired_state[edits[edit].job] = RUNNING
        elif edits[edit].kind == SERVICE:
            host.desired_service = edits[edit].cores
    assert (host.state[:n_jobs] == PENDING).all()  # none of them runs
    assert len({one.job for one in asked if one.kind == START}) == 3
    assert [one.kind for one in asked[-2:]] == [KEEP, KEEP]


def test_a_short_job_interrupts_a_long_one_that_then_goes_on() -> None:
    scenario = load_scenario("family-training-0-40")  # 2 jobs, the first the longer one
    jct_s = []
    for interrupts in (False, True):
        most, paused = 0, False
        for host in played(scenario, 1, 0, interrupts=interrupts):
            most = max(most, int((host["state"] == RUNNING).sum()))
            paused |= bool((host["state"] == PAUSED).any())
        assert (most, paused) == (1, interrupts)
        jct_s.append(float((host["end_s"] - host["arrival_s"]).mean()))
    assert jct_s[1] < 0.9 * jct_s[0]


def test_memcached_has_the_smallest_set_that_serves_its_load() -> None:
    """A smaller one only once that serves the load well; without a probe a larger one sooner."""
    scenario = load_scenario("cca-2025")
    table = list_table(scenario, edit_table(scenario))
    hosts, _ = begun(scenario)
    host = hosts.view(np.recarray)[0]
    small, large = (mask_of(cores) for cores in scenario.service.core_choices[:2])
    most_qps = scenario.load.qps_max

    def wanted(qps: float, now: int, p95_us: float = 300.0) -> int:
        host.qps, host.desired_service, host.probed_p95_us = qps * most_qps, now, p95_us
        edit = service_edit(host, table.sets, table.usual, 0.5)
        masks = {edit: mask for mask, _, edit in table.sets.tolist()}
        return now if edit == KEEP else masks[edit]

    assert wanted(0.49, small) == small
    assert wanted(0.51, small) == large
    assert wanted(0.49, large) == large
    assert wanted(0.5 * RELEASE - 0.01, large) == small
    assert wanted(0.5 * UNPROBED + 0.01, small, p95_us=0.0) == large
    host.worst_p95_us = 2.0 * host.slo_us
    assert wanted(0.26, small) == large


def test_compiled_it_does_the_same_and_stops_where_a_job_ends() -> None:
    edits = edit_table(SHARING)
    table = list_table(SHARING, edits)
    one = number_of(3, 1, 1.0, 0.0)
    *_, plain = played(SHARING, 3, 1)
    hosts, targets = begun(SHARING)
    ended, stops, done = np.zeros(1, np.int64), 0, 0
    while not ended[0]:
        follow_batch(
            hosts, np.zeros(1, np.int64), edits.rows[None], targets, table.starts[None],
            table.places[None], table.pauses[None], table.sets[None],
            np.array([len(table.sets)]), np.array([table.usual]), np.array([False]), LISTS,
            LIST_SERVED, np.array([one]), False, np.zeros(len(TERMS)), ended,
        )  # fmt: skip
        stops += 1
        seen = int((hosts["job_state"][0] == DONE).sum())
        assert seen > done or ended[0]
        done = seen
    assert 1 < stops <= len(SHARING.jobs)
    for field in ("now_s", "end_s", "violations", "decisions"):
        assert np.array_equal(hosts[0][field], plain[field]), field
