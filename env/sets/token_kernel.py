"""What simulated machines show as tokens, and which slots are legal, compiled."""

from env.physics.compiled import callable_from_kernel, compiled
from env.sets import pointers, tokens

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
def note_use(h):
    """See `env.sets.tokens.note_use_of_jobs`; of a host row."""
    tokens.note_use_of_jobs(h)


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
def write_rows(hosts, playing, blank, sets, n_sets, slot_of, layout, observations):
    """
    Write the tokens of each of B hosts, each of which plays one of S scenarios.

    :param hosts: structured array[B]
    :param playing: int64[B], the scenario of each host
    :param blank: float32[S, size], see `env.sets.tokens.TokenTable`
    :param sets: int64[S, most_sets, 2]
    :param n_sets: int64[S], how many of them each scenario has
    :param slot_of: int64[S, n_edits]
    :param layout: `env.sets.tokens.Layout.offsets`
    :param observations: float32[B, size], receives the tokens
    """
    for b in range(hosts.shape[0]):
        s = playing[b]
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
