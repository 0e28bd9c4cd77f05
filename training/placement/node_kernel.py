"""One node of a plan, run in the simulator's own kernel: who waits for whom, and nothing else."""

from env.codes import DONE, RUNNING
from env.physics.compiled import compiled
from env.simulator import kernel
from env.simulator.rates import SOON_S
from env.simulator.sensing import sense


@compiled
def run_node(h, targets, own, waits, not_before_s, serve_until_s):
    """
    Run the jobs of one node to their end, or to the time cap, and its memcached as long as wanted.

    :param h: a host row at the start of its episode, with the jobs' places as desired
    :param targets: float64[n], the load trace [requests/s]
    :param own: the jobs of this node, as a bit mask
    :param waits: int64[J], those of them that each waits for, as a bit mask
    :param not_before_s: float64[J], when those of other nodes that it waits for have ended [s]
    :param serve_until_s: when the last job of the other nodes ends [s]
    """
    h.wake_on_events = 1
    while h.now_s < h.duration_s - SOON_S:
        until_s = h.duration_s
        ended = 0
        for job in range(waits.shape[0]):
            if h.true_state[job] == DONE:
                ended |= 1 << job
        if ended & own == own:
            until_s = serve_until_s
            if h.now_s >= until_s - SOON_S:
                break
        for job in range(waits.shape[0]):
            if (own >> job) & 1 and waits[job] & ~ended == 0:
                if not_before_s[job] <= h.now_s + SOON_S:
                    h.desired_state[job] = RUNNING
                else:
                    until_s = min(until_s, not_before_s[job])
        kernel.apply_desired(h, False)
        kernel.advance(h, targets, until_s)
        sense(h)


@compiled
def run_node_at(hosts, b, targets, own, waits, not_before_s, serve_until_s):
    """See `run_node`; on host b."""
    run_node(hosts[b], targets, own, waits, not_before_s, serve_until_s)
