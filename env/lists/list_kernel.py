"""Hosts that follow list schedules, compiled."""

from env.lists import following
from env.physics.compiled import callable_from_kernel, compiled
from env.sets.token_kernel import note_use
from env.simulator import kernel

callable_from_kernel(
    following.gone,
    following.jobs_there,
    following.work_left_s,
    following.turn_of,
    following.rank_of,
    following.first_jobs,
    following.set_serving,
    following.service_edit,
    following.list_edit,
)


@compiled
def follow(
    h, rows, targets, starts, places, pauses, sets, usual, interrupts, lists, served, to_the_end,
    terms,
):  # fmt: skip
    """
    Follow a list until a job arrives or ends, or to the end of the episode.

    :param h: host row
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param targets: float64[n_intervals], the load trace [requests/s]
    :param starts: see `env.lists.menu.ListTable`, as the next four
    :param places: int64[J, 2]
    :param pauses: int64[J]
    :param sets: int64[k, 3]
    :param usual: number of sets
    :param interrupts: see `env.lists.following.turn_of`
    :param lists: int64[3], the list: see `env.lists.menu.LISTS`
    :param served: what memcached's smallest set serves, over the largest load
    :param to_the_end: whether no job that arrives or ends matters
    :param terms: float64[len(TERMS)], room for the reward terms of a step, which nobody reads
    :return: 0, `TERMINATED` or `TRUNCATED`
    """
    there = following.jobs_there(h, h.n_jobs)
    while True:
        edit = following.list_edit(
            h, h.n_jobs, rows, starts, places, pauses, sets, usual, lists[0], lists[1], lists[2],
            served, interrupts,
        )  # fmt: skip
        ended = kernel.step(h, rows, targets, edit, 1.0, terms)
        if ended != 0 or (not to_the_end and following.jobs_there(h, h.n_jobs) != there):
            return ended
        note_use(h)


@compiled
def follow_batch(
    hosts, playing, rows, targets, starts, places, pauses, sets, n_sets, usual, interrupts, lists,
    served, chosen, to_the_end, terms, ended,
):  # fmt: skip
    """
    `follow` on each of B hosts, each of which plays one of S scenarios; those that ended stay.

    :param hosts: structured array[B]
    :param playing: int64[B], the scenario of each host
    :param rows: int64[S, n_edits, 7]
    :param targets: float64[B, n_intervals]
    :param starts: int64[S, J, len(SHARES)]
    :param places: int64[S, J, 2]
    :param pauses: int64[S, J]
    :param sets: int64[S, k, 3]
    :param n_sets: int64[S], how many of them each scenario has
    :param usual: int64[S]
    :param interrupts: bool[S]
    :param lists: int64[n_lists, 3], see `env.lists.menu.LISTS`
    :param served: float64[n_lists]
    :param chosen: int64[B], the list of each host
    :param to_the_end: see `follow`
    :param terms: see `follow`
    :param ended: int64[B], receives 0, `TERMINATED` or `TRUNCATED`; who has ended is left alone
    """
    for b in range(hosts.shape[0]):
        if ended[b] != 0:
            continue
        s, one = playing[b], chosen[b]
        ended[b] = follow(
            hosts[b], rows[s], targets[b], starts[s], places[s], pauses[s], sets[s, : n_sets[s]],
            usual[s], interrupts[s], lists[one], served[one], to_the_end, terms,
        )  # fmt: skip
