"""The Gymnasium environment of the scenario family: another host and other jobs each time."""

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from env.codes import TERMINATED, TRUNCATED
from env.errors import InputError
from env.family.drawing import drawn_names, is_drawn
from env.reward import TERMS
from env.scenario import MAX_JOBS, MOST_VCPUS, load_scenario
from env.sets.pointers import edits_of
from env.sets.token_kernel import legal_slots_batch, write_row_at
from env.sets.tokens import Layout, token_table
from env.simulator import kernel
from env.simulator.load import Purpose, trace_seeds
from env.simulator.machine import EpisodeFactory, episode_summary

LAYOUT = Layout(MAX_JOBS, MOST_VCPUS)
"""Room for every scenario of the family."""

N_SCENARIOS = 10**9
"""A seed draws so many scenarios at most."""


class FamilyEnv(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """
    `coretide/Colocation-v0` on another drawn scenario in each episode (`env.family.drawing`).

    STATE:
        float32[1634], tokens one after another (`env.sets.tokens` says what the numbers are): host
        22, memcached 28, vCPUs 16 x 18, their siblings 16, jobs 20 x 47, the jobs' vCPUs and places
        20 x 17. All numbers are 0 of a vCPU that the scenario does not have, and of a job that is
        not there, has not arrived or is done.

    ACTIONS:
        Discrete(1357), slots (`env.sets.pointers`): keep, 16 sets of memcached, and for each job 16
        starts, 50 places and a pause. A slot that no edit of the scenario has, or that is not legal
        now (`action_mask`), keeps.

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
        self.observation_space = spaces.Box(-np.inf, np.inf, (LAYOUT.size,), np.float32)
        self.action_space = spaces.Discrete(len(LAYOUT.slots))
        self._terms = np.zeros(len(TERMS))
        self._hosts: npt.NDArray[Any] | None = None

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
        self.scenario = load_scenario(name)
        factory = EpisodeFactory(self.scenario)
        self._table = token_table(self.scenario, LAYOUT)
        self._edit_of = edits_of(self._table.slot_of, LAYOUT.slots)
        self._hosts, self._targets = factory.new_hosts(1), factory.new_targets(1)
        (trace_seed,) = trace_seeds(entropy, 1, self.purpose)
        factory.begin(self._hosts, self._targets, 0, trace_seed, self.np_random)
        return self._observe(), {"scenario": name, "trace_seed": trace_seed}

    def step(
        self, action: np.int64 | int
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """
        Take one decision.

        :param action: a slot; see the class
        :raises ValueError: if it is not in the action space
        :raises ResetNeeded: before the first `reset`
        """
        if self._hosts is None:
            raise ResetNeeded("call reset before the first step")
        if not 0 <= int(action) < len(self._edit_of):
            raise ValueError(f"action {action} is not one of 0 to {len(self._edit_of) - 1}")
        edit = max(int(self._edit_of[action]), 0)
        rows, targets = self._table.edits.rows, self._targets[0]
        ended = kernel.step_at(self._hosts, 0, rows, targets, edit, self.gamma, self._terms)
        terms = dict(zip(TERMS, self._terms.tolist(), strict=True))
        info: dict[str, Any] = {"reward_terms": terms}
        if ended:
            info["episode_summary"] = episode_summary(self._hosts[0], self.scenario)
        reward = sum(terms.values())
        return self._observe(), reward, ended == TERMINATED, ended == TRUNCATED, info

    def action_mask(self) -> npt.NDArray[np.bool_]:
        """bool[1357]: which slots are legal now; the tokens say the same."""
        legal = np.zeros((1, len(LAYOUT.slots)), np.float32)
        legal_slots_batch(self._observe()[None], LAYOUT.offsets, legal)
        mask: npt.NDArray[np.bool_] = legal[0] > 0.5
        return mask

    def _observe(self) -> npt.NDArray[np.float32]:
        row, table = np.empty(LAYOUT.size, np.float32), self._table
        write_row_at(
            self._hosts, 0, table.blank, table.sets, table.slot_of, LAYOUT.offsets, row
        )  # fmt: skip
        return row
