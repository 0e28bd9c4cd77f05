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
    tokens.write_ranks,
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
    hosts, playing, rows, targets, edit_of, chosen, gamma, terms, ended,
    blank, sets, n_sets, slot_of, layout, observations,
):  # fmt: skip
    """
    One decision on each of B hosts, each of which plays one of S scenarios.

    :param hosts: structured array[B]
    :param playing: int64[B], the scenario of each host
    :param rows: int64[S, n_edits, 7], see `env.action.EditTable`
    :param targets: float64[B, n_intervals]
    :param edit_of: int64[S, n_slots], see `env.sets.pointers.edits_of`
    :param chosen: int64[B], each host's slot; one that is no edit keeps
    :param gamma: discount for the shaping term
    :param terms: float64[B, len(TERMS)], receives the reward terms
    :param ended: int64[B], receives 0, `TERMINATED` or `TRUNCATED`
    :param blank: float32[S, size], see `env.sets.tokens.TokenTable`
    :param sets: int64[S, most_sets, 2]
    :param n_sets: int64[S], how many of them each scenario has
    :param slot_of: int64[S, n_edits]
    :param layout: `env.sets.tokens.Layout.offsets`
    :param observations: float32[B, size], receives the tokens
    """
    for b in range(hosts.shape[0]):
        s = playing[b]
        edit = max(edit_of[s, chosen[b]], 0)
        ended[b] = kernel.step(hosts[b], rows[s], targets[b], edit, gamma, terms[b])
        write_row(hosts[b], blank[s], sets[s, : n_sets[s]], slot_of[s], layout, observations[b])


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
