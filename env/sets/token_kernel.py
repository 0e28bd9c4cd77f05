"""
Decisions of a policy that reads tokens and chooses slots, compiled.

The same step as in `env.simulator.kernel`; what is seen and how an edit is named differ.
"""

from env.physics.compiled import callable_from_kernel, compiled
from env.sets import pointers, tokens
from env.simulator import kernel

callable_from_kernel(
    pointers.legal_slots,
    tokens.lg,
    tokens.note_use_of_jobs,
    tokens.write_tokens,
    tokens.write_service,
    tokens.write_vcpus,
)


@compiled
def write_row(h, blank, sets, slot_of, layout, row):
    """
    Write the tokens of a host.

    :param h: host row
    :param blank: see `env.sets.tokens.TokenTable`, as the next two
    :param sets: int64[n_sets, 2]
    :param slot_of: int64[n_edits]
    :param layout: `env.sets.tokens.Layout.offsets`
    :param row: float32[size], receives the tokens
    """
    for index in range(blank.shape[0]):
        row[index] = blank[index]
    tokens.note_use_of_jobs(h)
    tokens.write_tokens(h, sets, slot_of, layout, row)


@compiled
def write_row_at(hosts, b, blank, sets, slot_of, layout, row):
    """See `write_row`; of host b."""
    write_row(hosts[b], blank, sets, slot_of, layout, row)


@compiled
def step_tokens_batch(
    hosts, rows, targets, edit_of, chosen, gamma, terms, rewards, ended,
    blank, sets, slot_of, layout, observations,
):  # fmt: skip
    """
    One decision on each of B hosts of one scenario.

    :param hosts: structured array[B]
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param targets: float64[B, n_intervals]
    :param edit_of: int64[n_slots], see `env.sets.pointers.edits_of`
    :param chosen: int64[B], each host's slot; one that is no edit keeps
    :param gamma: discount for the shaping term
    :param terms: float64[B, len(TERMS)], receives the reward terms
    :param rewards: float32[B], receives their sums
    :param ended: int64[B], receives 0, `TERMINATED` or `TRUNCATED`
    :param blank: see `write_row`, as the next three
    :param sets: int64[n_sets, 2]
    :param slot_of: int64[n_edits]
    :param layout: `env.sets.tokens.Layout.offsets`
    :param observations: float32[B, size], receives the tokens
    """
    for b in range(hosts.shape[0]):
        edit = max(edit_of[chosen[b]], 0)
        ended[b] = kernel.step(hosts[b], rows, targets[b], edit, gamma, terms[b])
        rewards[b] = terms[b].sum()
        write_row(hosts[b], blank, sets, slot_of, layout, observations[b])


@compiled
def legal_slots_batch(observations, layout, legal):
    """
    Mark the legal slots of B decisions (`env.sets.pointers.legal_slots`).

    :param observations: float32[B, size]
    :param layout: `env.sets.tokens.Layout.offsets`
    :param legal: float32[B, n_slots], receives 1.0 or 0.0
    """
    for b in range(observations.shape[0]):
        pointers.legal_slots(observations[b], layout, legal[b])
