"""
Which action encoding learns best? The experiment behind the choice in docs/decisions.md.

All variants share the simulator, the reward, the network and the trainer (stock PPO):

- `edits`: one masked Discrete over edits, decisions when something happens (what coretide uses);
- `edits-flat`: the same edits in a flat loop, one decision every 0.25 s;
- `edits-tiered`: the flat loop chooses memcached's vCPUs at every decision, but jobs are placed
  only after a job has ended or every 2 s;
- `factorised`: MultiDiscrete, one head for memcached and one for each job, all decided anew when
  something happens; combinations that cannot be are projected to the nearest legal allocation (a
  pause of a job that was never started leaves it pending, a place for a job that is done is
  dropped) and counted.

    python -m benchmarks.encodings --steps 2000000 --seeds 2 --json encodings.json
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnvWrapper

from env.action import CORES, JOB, KIND, WEIGHT
from env.allocation import JobState
from env.codes import KEEP, PAUSE, PLACE, SERVICE
from env.commandline import OneLineParser, require_writable, whole_number
from env.errors import exit_on_bad_input
from env.scenario import load_scenario
from env.simulator.vector_env import ColocationVecEnv
from training.ppo.training_run import new_model
from training.recipe import Recipe, load_recipe

FLAT = {"hold_s": 0.25, "period_s": 0.25}
PLACEMENT_EVERY_S = 2.0
VARIANTS = ("edits", "edits-flat", "edits-tiered", "factorised")


class TieredPlacement(VecEnvWrapper):
    """Masks every edit of a job except after a job's end and every `PLACEMENT_EVERY_S`."""

    def __init__(self, venv: ColocationVecEnv):
        super().__init__(venv)
        self.base = venv
        kinds = venv.factory.table.rows[:, KIND]
        self._fast = np.isin(kinds, (KEEP, SERVICE))
        self._done = np.zeros(venv.num_envs, np.int64)
        self._next_s = np.zeros(venv.num_envs)

    def _masked(self, observations: Any) -> Any:
        hosts = self.base.hosts
        done = (hosts["job_state"] == JobState.DONE).sum(axis=1)
        now = hosts["now_s"]
        due = (done != self._done) | (now >= self._next_s) | (now == 0.0)
        self._next_s[due] = now[due] + PLACEMENT_EVERY_S
        self._done = done
        mask = observations[:, -len(self._fast) :]
        mask[~due] *= self._fast
        return observations

    def reset(self) -> Any:
        """Start all episodes."""
        return self._masked(self.venv.reset())

    def step_wait(self) -> Any:
        """Step, then mask."""
        observations, rewards, dones, infos = self.venv.step_wait()
        return self._masked(observations), rewards, dones, infos


class FactorisedAllocation(VecEnvWrapper):
    """A whole allocation at every decision, head by head; illegal parts are projected."""

    def __init__(self, venv: ColocationVecEnv):
        rows = venv.factory.table.rows
        self.base = venv
        self.services = rows[rows[:, KIND] == SERVICE, CORES]
        first_job = rows[rows[:, JOB] == 0]
        self.places = first_job[first_job[:, KIND] == PLACE][:, [CORES, WEIGHT]]
        n_jobs = len(venv.scenario.jobs)
        heads = [len(self.services)] + [len(self.places) + 1] * n_jobs
        super().__init__(venv, action_space=spaces.MultiDiscrete(heads))
        self.projected = 0
        assert (rows[:, KIND] == PAUSE).any()

    def reset(self) -> Any:
        """Start all episodes."""
        return self.venv.reset()

    def step_async(self, actions: Any) -> None:
        """Write the projected allocations as desired; the kernel regulates them."""
        hosts = self.base.hosts
        hosts["desired_service"] = self.services[actions[:, 0]]
        choice = actions[:, 1:]
        pause = choice == len(self.places)
        place = self.places[np.where(pause, 0, choice)]
        state = hosts["state"]
        pending, done = state == JobState.PENDING, state == JobState.DONE
        self.projected += int((pause & pending).sum() + (~pause & done).sum())
        desired = np.where(pause, JobState.PAUSED, JobState.RUNNING)
        desired = np.where(pause & pending, JobState.PENDING, desired)
        hosts["desired_state"] = desired
        hosts["desired_set"] = np.where(pause, hosts["desired_set"], place[..., 0])
        hosts["desired_place"] = -1
        hosts["desired_weight"] = np.where(pause, hosts["desired_weight"], place[..., 1])
        self.venv.step_async(np.zeros(self.num_envs, np.int64))

    def step_wait(self) -> Any:
        """Step."""
        return self.venv.step_wait()


class LastEpisodes(BaseCallback):
    """Keeps the summaries of the episodes that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.summaries: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.summaries += [
            info["episode_summary"] for info in self.locals["infos"] if "episode_summary" in info
        ]
        return True


def run(variant: str, seed: int, steps: int, recipe: Recipe) -> dict[str, Any]:
    """
    Train one variant.

    :param variant: one of `VARIANTS`
    :param seed: of everything random
    :param steps: decisions
    :param recipe: hyperparameters, the same for all variants
    """
    scenario = load_scenario("cca-2025")
    if variant in ("edits-flat", "edits-tiered"):
        scenario = scenario.with_changes(control=FLAT)
    environments: Any = ColocationVecEnv(scenario, recipe.n_envs, recipe.gamma, seed=seed)
    if variant == "edits-tiered":
        environments = TieredPlacement(environments)
    if variant == "factorised":
        environments = FactorisedAllocation(environments)
        model = new_model(recipe, environments, seed, policy=ActorCriticPolicy)
    else:
        model = new_model(recipe, environments, seed)
    episodes = LastEpisodes()
    began = time.perf_counter()
    model.learn(steps, callback=episodes)
    last = episodes.summaries[-200:]
    result = {
        "variant": variant,
        "seed": seed,
        "episodes": len(episodes.summaries),
        "seconds": time.perf_counter() - began,
        "projected_per_decision": getattr(environments, "projected", 0) / steps,
    }
    for name in ("makespan_s", "violation_ratio", "completed", "actuations", "decisions"):
        result[name] = float(np.mean([one[name] for one in last])) if last else None
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """
    Run all variants, seed by seed, and write what came out.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(prog="python -m benchmarks.encodings", description=__doc__.splitlines()[1])
    add = line.add_argument
    add("--steps", type=whole_number(1), default=2_000_000, help="decisions of a run (%(default)s)")
    add("--seeds", type=whole_number(1), default=2, help="runs of each variant (%(default)s)")
    add("--json", type=Path, help="write the figures here")
    arguments = line.parse_args(argv)
    with exit_on_bad_input():
        require_writable(arguments.json)
    torch.set_num_threads(1)
    recipe = load_recipe("default")
    results = []
    for seed in range(arguments.seeds):
        for variant in VARIANTS:
            results.append(run(variant, seed, arguments.steps, recipe))
            print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
