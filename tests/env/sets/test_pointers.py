"""Slots: each edit has one of its own, and those are legal that the edits' own mask allows."""

from __future__ import annotations

import numpy as np
import pytest

from env.action import edit_table, legal_edits
from env.control import ControlState
from env.errors import InputError
from env.reward import TERMS
from env.scenario import load_scenario, scenario_names
from env.sets.pointers import NO_EDIT, Slots, edits_of, legal_slots, slots_of
from env.sets.token_kernel import legal_slots_batch, write_row_at, write_rows
from env.sets.tokens import Layout, token_table, write_tokens
from env.simulator import kernel
from env.simulator.machine import EpisodeFactory

ROOMY = Layout(20, 17)


@pytest.mark.parametrize("name", scenario_names())
def test_edits_and_slots_map_one_to_one(name: str) -> None:
    scenario = load_scenario(name)
    table = edit_table(scenario)
    for layout in (Layout(len(scenario.jobs), scenario.machine.vcpus), ROOMY):
        slot_of = slots_of(scenario, table, layout.slots)
        edit_of = edits_of(slot_of, layout.slots)
        assert edit_of[slot_of].tolist() == list(range(len(table)))
        assert (edit_of != NO_EDIT).sum() == len(table)


def test_a_slot_means_the_same_in_scenarios_of_one_size() -> None:
    wordings: dict[int, set[str]] = {}
    for name in ("cca-2025", "cca-2024", "cca-2025-exclusive"):
        scenario = load_scenario(name)
        table = edit_table(scenario)
        for edit, slot in enumerate(slots_of(scenario, table, Slots(7, 4))):
            kind, job, cores, weight, threads = table[edit]
            # A job starts in the background only where it may share.
            told = (kind, job, cores, threads) if kind == 2 else (kind, job, cores, weight, threads)
            wordings.setdefault(int(slot), set()).add(str(told))
    assert all(len(told) == 1 for told in wordings.values())


def test_what_there_is_no_room_for_is_refused() -> None:
    scenario = load_scenario("cca-2025")
    with pytest.raises(InputError, match="7 jobs on 4 vCPUs; allowed are up to 7 on 3"):
        slots_of(scenario, edit_table(scenario), Slots(7, 3))


def test_two_edits_of_one_name_are_refused() -> None:
    scenario = load_scenario("prm-2020")
    job = scenario.jobs[0].model_dump() | {"threads": (16, 17)}
    doubled = scenario.model_copy(update={"jobs": (type(scenario.jobs[0])(**job),)})
    with pytest.raises(InputError, match="two thread counts of 16 or more"):
        edits_of(slots_of(doubled, edit_table(doubled), Slots(20, 17)), Slots(20, 17))


@pytest.mark.parametrize("name", ["cca-2025", "cca-2025-exclusive", "local", "local, unshared"])
@pytest.mark.parametrize("layout", [Layout(7, 4), ROOMY])
def test_the_tokens_allow_what_the_mask_allows(name: str, layout: Layout) -> None:
    scenario = load_scenario(name.removesuffix(", unshared"))
    if name.endswith("unshared"):
        scenario = scenario.with_changes(regulation={"share_service_cores": False})
    factory = EpisodeFactory(scenario)
    table = token_table(factory.scenario, layout)
    edit_of = edits_of(table.slot_of, layout.slots)
    hosts, targets = factory.new_hosts(1), factory.new_targets(1)
    rng = np.random.default_rng(3)
    factory.begin(hosts, targets, 0, 99, rng)
    n_edits = len(table.edits)
    tokens = np.zeros((1, layout.size), np.float32)
    legal = np.zeros((1, len(layout.slots)), np.float32)
    row = np.zeros(factory.observation_size, np.float32)
    terms, ended, one = np.zeros(len(TERMS)), 0, np.zeros(1, np.int64)
    write_row_at(hosts, 0, table.blank, table.sets, table.slot_of, layout.offsets, tokens[0])
    while not ended:
        legal_slots_batch(tokens, layout.offsets, legal)
        kernel.observe_at(hosts, 0, table.edits.rows, row)
        assert (legal[0, table.slot_of] == row[-n_edits:]).all()
        assert legal.sum() == row[-n_edits:].sum()  # a slot without an edit is never legal
        keeps = legal[0, 0] and rng.random() < 0.7
        edit = edit_of[0 if keeps else rng.choice(np.flatnonzero(legal[0]))]
        ended = kernel.step_at(hosts, 0, table.edits.rows, targets[0], edit, 1.0, terms)
        write_rows(
            hosts, one, table.blank[None], table.sets[None], one + len(table.sets),
            table.slot_of[None], layout.offsets, tokens,
        )  # fmt: skip


def test_legality_is_read_the_same_uncompiled() -> None:
    scenario = load_scenario("local")
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 3.0))
    control.vcpu_busy_s = [0.0, 0.0]
    table = token_table(scenario, ROOMY)
    tokens, legal = table.blank.copy(), np.zeros(len(ROOMY.slots), np.float32)
    write_tokens(control, table.sets, table.slot_of, ROOMY.offsets, tokens)
    legal_slots(tokens, ROOMY.offsets, legal)
    mask = np.zeros(len(table.edits))
    legal_edits(control, table.edits.rows, mask)
    assert (legal[table.slot_of] == mask).all()
    assert legal.sum() == mask.sum()
