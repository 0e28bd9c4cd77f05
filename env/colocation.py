"""The Gymnasium environments: scheduling decisions on one machine, simulated or real."""

from typing import Any, Protocol

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from env.action import EditTable, edit_table
from env.codes import NOT_ARRIVED, PAUSE, PLACE, SERVICE, START, TERMINATED, TRUNCATED
from env.errors import InputError
from env.family.drawing import drawn_names, is_drawn
from env.observation import feature_count, features_of
from env.scenario import MAX_JOBS, MOST_VCPUS, Scenario, load_scenario, profile_traits
from env.simulator.load import Purpose, trace_seeds


class Backend(Protocol):
    """
    A machine that an environment can run episodes on.

    `makes_load` says whether the machine makes its own load. If not, somebody else loads it, and
    trace seeds have no effect.
    """

    makes_load: bool

    def begin(self, trace_seed: int, rng: np.random.Generator) -> None:
        """
        Start an episode.

        :param trace_seed: seed of mcperf's load
        :param rng: draws everything else that is random
        """

    def step(self, edit: int, gamma: float) -> tuple[int, dict[str, float]]:
        """
        Take one decision.

        :param edit: index of the edit
        :param gamma: the trainer's discount, for the shaping term
        :return: 0, `TERMINATED` or `TRUNCATED`, and the reward terms by name
        """

    def observe(self, row: npt.NDArray[np.float32]) -> None:
        """
        Write the observation.

        :param row: float32[n_features + n_edits], receives features and action mask
        """

    def summary(self) -> dict[str, Any]:
        """The figures of the episode so far."""

    def close(self) -> None:
        """End the episode; whatever was done to a real machine is undone."""


class ColocationEnv(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """
    Schedule batch jobs beside memcached so that they end early and the SLO holds.

    STATE:
        float32[n_features + n_edits]: load, memcached's CPU use, load history and timing, who
        holds which vCPU, each job's state, progress, threads, weight and vCPUs, all in fixed
        scales (`env.observation` lists them with their units); then the action mask, 1 where an
        edit is legal now. For `cca-2025`: 97 + 87.

    ACTIONS:
        Discrete(n_edits): keep the allocation, or edit one thing in it: memcached's vCPUs, or
        one job's start (threads, weight), place (vCPU set, weight) or pause (`env.action`). An
        edit that the mask forbids changes nothing. After an edit the next decision follows one
        polling period later (25 ms), after `keep` when a job ends, when the load moves, or when
        the hold time (1 s) is over.

    REWARDS:
        minus the seconds passed, minus the cost of breaking the SLO, plus potential-based
        shaping, in units of 10 s (`env.reward`); `info["reward_terms"]` has each term.

    REFERENCE:
        the load is mcperf's dynamic trace; the physics is fitted to measured runs (the profile).

    An episode terminates when all jobs are done and is truncated at the load's duration. Its
    last `info["episode_summary"]` has makespan, violation ratio, per-job times and actuations.

    :param scenario: a shipped scenario's name, a YAML file, or a `Scenario`
    :param gamma: the trainer's discount, for the shaping term
    :param backend: the machine; a simulated one with the scenario's profile if none is given
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as the base class has it

    def __init__(
        self,
        scenario: str | Scenario = "cca-2025",
        gamma: float = 1.0,
        backend: Backend | None = None,
    ):
        self.scenario = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
        self.gamma = gamma
        self.backend = backend or _simulated(self.scenario)
        self.table: EditTable = edit_table(self.scenario)
        self._size = feature_count(self.scenario) + len(self.table)
        self._begun = False
        self.observation_space = spaces.Box(-np.inf, np.inf, (self._size,), np.float32)
        self.action_space = spaces.Discrete(len(self.table))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """
        Start an episode.

        :param seed: fixes everything that is random in this and the following episodes
        :param options: `{"trace_seed": n}` asks for a certain mcperf trace, n from 1 to 2^31 - 1
        :raises InputError: if a trace is asked for where somebody else makes the load, or a real
            machine is not as it must be
        :raises ValueError: if the trace seed is none of mcperf's
        """
        super().reset(seed=seed)
        trace_seed = (options or {}).get("trace_seed")
        if trace_seed is not None and not self.backend.makes_load:
            raise InputError("trace_seed: this machine's load is made by somebody else")
        if trace_seed is None:
            entropy = int(self.np_random.integers(2**31))
            (trace_seed,) = trace_seeds(entropy, 1, "training")
        self.backend.begin(trace_seed, self.np_random)
        self._begun = True
        return self._observe(), {"trace_seed": trace_seed} if self.backend.makes_load else {}

    def step(
        self, action: np.int64 | int
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """
        Take one decision; see the class for what it does.

        :param action: index of the edit
        :raises ValueError: if the action is not in the action space
        :raises ResetNeeded: before the first `reset`
        """
        if not self._begun:
            raise ResetNeeded("call reset before the first step")
        if not 0 <= int(action) < len(self.table):
            raise ValueError(f"action {action} is not one of 0 to {len(self.table) - 1}")
        ended, terms = self.backend.step(int(action), self.gamma)
        info: dict[str, Any] = {"reward_terms": terms}
        if ended:
            info["episode_summary"] = self.backend.summary()
        reward = sum(terms.values())
        return self._observe(), reward, ended == TERMINATED, ended == TRUNCATED, info

    def action_mask(self) -> npt.NDArray[np.bool_]:
        """bool[n_edits]: which edits are legal now; the end of the observation says the same."""
        return self._observe()[-len(self.table) :] > 0.5

    def close(self) -> None:
        """End the episode; a real machine is left as it was found."""
        self.backend.close()

    def _observe(self) -> npt.NDArray[np.float32]:
        row = np.empty(self._size, np.float32)
        self.backend.observe(row)
        return row


def _simulated(scenario: Scenario) -> Backend:
    # Imported here: an environment over a real machine needs no compiled simulator.
    from env.simulator.machine import EpisodeFactory, SimulatedMachine

    return SimulatedMachine(EpisodeFactory(scenario))


# What a scenario of the family has of each kind of edit at most, by job but for memcached's sets.
MOST_SETS, MOST_STARTS, MOST_PLACES = 5, 6, 26
PER_JOB = MOST_STARTS + MOST_PLACES + 1
N_ACTIONS = 1 + MOST_SETS + MAX_JOBS * PER_JOB

HOST_TRAITS = 4
JOB_TRAITS = ("work_s", "serial_fraction", "cores_per_thread", "pressure", "sensitivity")
N_TRAITS = HOST_TRAITS + MAX_JOBS * (len(JOB_TRAITS) + 1)
N_FEATURES = features_of(MAX_JOBS, MOST_VCPUS)
N_SCENARIOS = 10**9
"""A seed draws so many training scenarios at most."""


class FamilyEnv(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """
    `coretide/Colocation-v0` on another drawn scenario in each episode (`env.family.drawing`).

    STATE:
        float32[N_FEATURES + N_TRAITS + N_ACTIONS]: the features of `env.observation` for 20 jobs
        and 16 vCPUs, 0 where the scenario has fewer (a job that is not there is done); what the
        scenario is (`traits_of`), 0 for jobs that have not arrived; then the action mask, 1 where
        an edit is legal now.

    ACTIONS:
        Discrete(N_ACTIONS): those of `coretide/Colocation-v0` at places of their own (`slots_of`):
        keep, memcached's sets, and for each job its starts, places and pause. What a scenario does
        not have is never legal, and keeps.

    REWARDS:
        those of `coretide/Colocation-v0`; where jobs arrive, their mean completion time counts too.

    Gymnasium's seed fixes which scenarios come, and everything random in them.

    :param gamma: the trainer's discount, for the shaping term
    :param purpose: whose scenarios are drawn, one of `training`, `selection` and `report`
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as the base class has it

    def __init__(self, gamma: float = 1.0, purpose: Purpose = "training"):
        load_scenario(f"family-{purpose}-0-0")
        self.gamma, self.purpose = gamma, purpose
        size = N_FEATURES + N_TRAITS + N_ACTIONS
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = spaces.Discrete(N_ACTIONS)
        self._machine: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """
        Draw a scenario and start an episode of it.

        :param seed: fixes everything that is random in this and the following episodes
        :param options: `{"scenario": name}` asks for a certain drawn one
        :raises InputError: if that is none
        """
        super().reset(seed=seed)
        index, entropy = (int(self.np_random.integers(N_SCENARIOS)) for _ in range(2))
        name = (options or {}).get("scenario") or f"family-{self.purpose}-0-{index}"
        if not is_drawn(name):
            example = drawn_names(self.purpose, 0, 1)[0]
            raise InputError(f"scenario: {name} is not drawn; allowed are names like {example}")
        scenario = load_scenario(name)
        self._machine = _simulated(scenario)
        table = edit_table(scenario)
        self._slots = slots_of(table)
        self._edits = np.zeros(N_ACTIONS, np.int64)
        self._edits[self._slots] = np.arange(len(table))
        self._row = np.empty(N_FEATURES + len(table), np.float32)
        self._traits = traits_of(scenario)
        (trace_seed,) = trace_seeds(entropy, 1, self.purpose)
        self._machine.begin(trace_seed, self.np_random)
        return self._observe(), {"scenario": name, "trace_seed": trace_seed}

    def step(
        self, action: np.int64 | int
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """
        Take one decision.

        :param action: one of `N_ACTIONS`; see the class
        :raises ValueError: if it is not in the action space
        :raises ResetNeeded: before the first `reset`
        """
        if self._machine is None:
            raise ResetNeeded("call reset before the first step")
        if not 0 <= int(action) < N_ACTIONS:
            raise ValueError(f"action {action} is not one of 0 to {N_ACTIONS - 1}")
        ended, terms = self._machine.step(int(self._edits[action]), self.gamma)
        info: dict[str, Any] = {"reward_terms": terms}
        if ended:
            info["episode_summary"] = self._machine.summary()
        reward = sum(terms.values())
        return self._observe(), reward, ended == TERMINATED, ended == TRUNCATED, info

    def action_mask(self) -> npt.NDArray[np.bool_]:
        """bool[N_ACTIONS]: which are legal now; the end of the observation says the same."""
        return self._observe()[-N_ACTIONS:] > 0.5

    def _observe(self) -> npt.NDArray[np.float32]:
        self._machine.observe(self._row)
        seen = np.zeros(N_FEATURES + N_TRAITS + N_ACTIONS, np.float32)
        seen[:N_FEATURES] = self._row[:N_FEATURES]
        seen[N_FEATURES : N_FEATURES + N_TRAITS] = self._traits
        job_traits = seen[N_FEATURES + HOST_TRAITS : N_FEATURES + N_TRAITS].reshape(MAX_JOBS, -1)
        job_traits[self._machine.host.job_state == NOT_ARRIVED] = 0.0
        seen[N_FEATURES + N_TRAITS + self._slots] = self._row[N_FEATURES:]
        return seen


def slots_of(table: EditTable) -> npt.NDArray[np.int64]:
    """
    Where each edit of a scenario is among the actions, int64[n_edits].

    :param table: the scenario's edits
    :raises InputError: if it has more of a kind than there is room for
    """
    first = {SERVICE: 1, START: 0, PLACE: MOST_STARTS, PAUSE: MOST_STARTS + MOST_PLACES}
    room = {SERVICE: MOST_SETS, START: MOST_STARTS, PLACE: MOST_PLACES, PAUSE: 1}
    taken: dict[tuple[int, int], int] = {}
    slots = [0]
    for index in range(1, len(table)):
        edit = table[index]
        key = edit.kind, edit.job
        position = taken[key] = taken.get(key, -1) + 1
        if position >= room[edit.kind]:
            raise InputError(
                f"no room for {table.describe(index)}: a scenario of the family has "
                f"{room[edit.kind]} of a kind at most"
            )
        own = 0 if edit.kind == SERVICE else 1 + MOST_SETS + edit.job * PER_JOB
        slots.append(own + first[edit.kind] + position)
    return np.array(slots, np.int64)


def traits_of(scenario: Scenario) -> npt.NDArray[np.float32]:
    """
    What a scenario is, as far as nobody has to measure it, float32[N_TRAITS].

    Of the host vCPUs / 16, the share of them with a sibling, memcached's threads / 4 and log10 of
    the SLO [ms]; of each job log10 of its work [s], serial fraction, vCPUs a thread, pressure, 10 x
    sensitivity and its share of the memory.

    :param scenario: the problem
    """
    machine, service = scenario.machine, scenario.service
    values = [
        machine.vcpus / MOST_VCPUS,
        2.0 * len(machine.smt_siblings) / machine.vcpus,
        service.threads / 4.0,
        np.log10(service.slo_us / 1000.0),
    ]
    known = profile_traits(scenario.profile)
    for job in scenario.jobs:
        work_s, serial, wide, pressure, sensitivity = (known[job.name][of] for of in JOB_TRAITS)
        share = job.memory_mib / machine.memory_mib
        values += [np.log10(work_s), serial, wide, pressure, 10.0 * sensitivity, share]
    traits = np.zeros(N_TRAITS, np.float32)
    traits[: len(values)] = values
    return traits
