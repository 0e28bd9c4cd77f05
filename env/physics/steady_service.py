"""
memcached at a steady load, without a compiler: the equations of the physics in plain Python.

They say what a profile knows of a machine on which nothing, or background work, runs
(`env.physics.service`, `env.simulator.rates`; a test holds them equal). Who draws scenarios needs
that, and the live loop, which starts without the compiler that the physics needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLIENT_MOST = 0.95
"""
Share of its vCPU that a load generator takes at most.

Linux keeps real-time processes to so much of one (sched_rt_runtime_us).
"""

BACKGROUND_HALF = 0.05
"""
Busy fraction at which background work costs half of its full effect.

Memcached's wake-ups set the pace: it costs that work is there to be preempted, not how much.
"""

_HALVINGS = 20  # of the range of loads: far finer than anybody sees


@dataclass(frozen=True)
class SteadyService:
    """
    What serves, and where.

    :param traits: the profile's parameters by their names, see `env.scenario.profile_machine`
    :param threads: memcached's
    :param siblings: the SMT sibling of each vCPU, -1 without one
    """

    traits: Mapping[str, float]
    threads: int
    siblings: Sequence[int]

    def load_within_us(
        self, slo_us: float, cores: Sequence[int], most_qps: float, background: bool
    ) -> float:
        """
        The largest load whose p95 a set of vCPUs keeps within a limit [requests/s], by bisection.

        :param slo_us: the limit [us]
        :param cores: memcached's vCPUs
        :param most_qps: no larger load is asked for [requests/s]
        :param background: whether background work runs on every vCPU of the machine
        """
        low, high = 0.0, most_qps
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            if self.p95_us(cores, middle, background) <= slo_us:
                low = middle
            else:
                high = middle
        return low

    def p95_us(self, cores: Sequence[int], qps: float, background: bool = False) -> float:
        """
        p95 at a steady load (`env.physics.service.service_state`) [us].

        :param cores: memcached's vCPUs
        :param qps: the load [requests/s]
        :param background: whether background work runs on every vCPU, of no memory pressure
        """
        traits, threads = self.traits, self.threads
        client = [0.0] * len(self.siblings)
        client[-1] = client_share(qps, traits)
        present = 1.0 / (1.0 + BACKGROUND_HALF) if background else 0.0
        left = 1.0 - min(traits["background_capacity"] * present, 0.9)
        beside = max(traits["batch_smt"], traits["smt"]) if background else 1.0
        worth = self._vcpus_worth(cores, [left * (1.0 - one) for one in client], beside)
        capacity = traits["core_capacity_qps"] * traits["vm_speed"] * worth
        load = min(qps / capacity, 1.0)
        slower = 1.0 + traits["speed_latency"] * (1.0 / traits["vm_speed"] - 1.0)
        slower *= 1.0 + traits["batch_latency"] * background * (len(client) - len(cores))
        slower *= 1.0 + traits["background_latency"] * present
        crowd = max(threads / len(cores), 1.0)
        rise = max(traits["level_us"] - traits["idle_us"], 0.0)

        def calm_us(at_qps: float, at_load: float) -> float:
            risen = rise * at_qps / (at_qps + traits["rise_qps"])
            return slower * (traits["idle_us"] + risen + traits["queue_us"] * crowd * at_load)

        above = max(1e6 * traits["outstanding"] / capacity - calm_us(capacity, 1.0), 0.0)
        waiting = 0.0
        if threads > len(cores):
            waiting = (threads / len(cores) - 1.0) * load ** traits["slice_exponent"]
        if sum(client[core] for core in cores) > 0.0:
            n_threads = min(threads, len(cores))
            taken = sorted(client[core] for core in cores)[n_threads - 1]
            speed = traits["core_capacity_qps"] * traits["vm_speed"]
            need = max(load, min(qps / (speed * (1.0 - taken) * n_threads), 1.0))
            waiting += taken / traits["equal_share"] * need ** traits["equal_exponent"]
        flow = calm_us(qps, load) + above * load ** traits["knee_exponent"]
        return flow + traits["slice_us"] * waiting

    def _vcpus_worth(self, cores: Sequence[int], left: Sequence[float], beside: float) -> float:
        """
        What memcached's vCPUs are worth to its threads, as `env.physics.service.served`.

        :param cores: memcached's vCPUs
        :param left: of each vCPU's time, what others leave of it
        :param beside: speed of a vCPU whose sibling runs what may run there
        """
        own = {core: left[core] * (1.0 if self.siblings[core] < 0 else beside) for core in cores}
        taken: set[int] = set()
        worth = 0.0
        for _ in range(min(self.threads, len(cores))):
            best, best_gain = -1, -1.0
            for core in sorted(set(cores) - taken):
                gain, sibling = own[core], self.siblings[core]
                # The second one on its physical core adds what two threads get done there.
                if sibling in own and (own[sibling], -sibling) > (gain, -core):
                    both = (left[core] + left[sibling]) * self.traits["smt"]
                    gain = max(both - own[sibling], 0.0)
                if gain > best_gain:
                    best, best_gain = core, gain
            taken.add(best)
            worth += best_gain
        return worth


def client_share(qps: float, traits: Mapping[str, float]) -> float:
    """
    What load generator, loop and probe take of their vCPU (`env.simulator.rates`).

    :param qps: the load [requests/s]
    :param traits: see `env.scenario.profile_machine`
    """
    most = traits.get("client_cpu", 0.0)
    if most == 0.0:
        return 0.0
    part = qps / (traits["core_capacity_qps"] * traits["vm_speed"])
    used = most * part ** traits.get("client_exponent", 1.0) if part > 0.0 else 0.0
    return min(traits.get("agent_cpu", 0.0) + used, CLIENT_MOST)
