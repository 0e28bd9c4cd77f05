"""What a training run writes down while it learns: TensorBoard, checkpoints, progress."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Figure

from agents.checkpoint import read_checkpoint
from agents.ppo.network import MaskedNetwork
from agents.ppo.trained_policy import PPOPolicy
from env.action import KIND, KINDS
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from training.evaluation.episodes import EpisodeStart, run_episode
from training.evaluation.timeline import TimelineRecorder
from training.ppo.checkpoint_writing import describe, network_of, save_checkpoint
from training.ppo.selection import SELECTION_ENTROPY, Actor, Score, run_selection, score
from training.recipe import Recipe


class EpisodeLog(BaseCallback):
    """Episode figures and the action histogram of each rollout, for TensorBoard."""

    def _on_training_start(self) -> None:
        self._summaries: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode_summary" in info:
                self._summaries.append(info["episode_summary"])
        return True

    def _on_rollout_end(self) -> None:
        kinds = self.training_env.get_attr("table")[0].rows[:, KIND]
        taken = kinds[self.locals["rollout_buffer"].actions.astype(np.int64).ravel()]
        for kind, share in enumerate(np.bincount(taken, minlength=len(KINDS)) / taken.size):
            self.logger.record(f"actions/{KINDS[kind]}", share)
        if not self._summaries:
            return
        for name in ("makespan_s", "violation_ratio", "actuations", "overruled", "decisions"):
            self._record(f"episode/{name}", [summary[name] for summary in self._summaries])
        for term in self._summaries[0]["reward_terms"]:
            self._record(
                f"reward/{term}", [summary["reward_terms"][term] for summary in self._summaries]
            )
        for job in self._summaries[0]["jobs"]:
            times = [
                summary["jobs"][job]["end_s"] - summary["jobs"][job]["start_s"]
                for summary in self._summaries
                if summary["completed"]
            ]
            if times:
                self._record(f"jobs/{job}_s", times)
        self._summaries.clear()

    def _record(self, key: str, values: list[float]) -> None:
        self.logger.record(key, float(np.mean(values)))


class Evaluation(BaseCallback):
    """
    Scores the policy on the selection traces, keeps the best and a series of checkpoints.

    :param factory: what the selection episodes look like (no variation)
    :param varied: the same with drawn physics and intervals, or None if the recipe draws none
    :param recipe: how often, and on how many traces
    :param folder: the run's folder
    :param warm: whether the policy has learned before this run's first update (by imitation, or in
        the run that is resumed), so that it may be the best already
    """

    def __init__(
        self,
        factory: EpisodeFactory,
        varied: EpisodeFactory | None,
        recipe: Recipe,
        folder: Path,
        warm: bool,
    ):
        super().__init__()
        self.factory, self.varied = factory, varied
        self.recipe = recipe
        self.folder = folder
        self.warm = warm
        self.best: Score | None = None
        self._due = 0

    @property
    def _ppo(self) -> PPO:
        assert isinstance(self.model, PPO)
        return self.model

    def _on_training_start(self) -> None:
        self._due = self.num_timesteps + (0 if self.warm else self.recipe.evaluate_every)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        # At the start of a rollout the policy is the one the last update left.
        if self.num_timesteps >= self._due:
            self._due += self.recipe.evaluate_every
            self.evaluate()

    def keep(self, path: Path) -> None:
        """
        Let a checkpoint of an earlier run be the best until a better one takes its place.

        :param path: of that checkpoint; nothing happens if there is none
        :raises InputError: if it is not a checkpoint for this scenario
        """
        if path.is_file():
            checkpoint = read_checkpoint(path)
            checkpoint.require_scenario(self.factory.scenario)
            self.best, _ = self._score(MaskedNetwork(checkpoint.layers))

    def _score(self, actor: Actor) -> tuple[Score, list[dict[str, Any]]]:
        """The score of a policy, and its episodes on the profile's physics."""
        episodes = self.recipe.selection_episodes
        summaries = run_selection(actor, self.factory, episodes)
        varied = run_selection(actor, self.varied, episodes) if self.varied else []
        return score(summaries, varied), summaries

    def evaluate(self) -> Score:
        """Score the policy as it is now and save it."""
        result, summaries = self._score(network_of(self._ppo))
        for name, figure in asdict(result).items():
            self.logger.record(f"selection/{name}", figure)
        self.logger.record(
            "selection/actuations", float(np.mean([one["actuations"] for one in summaries]))
        )
        print(
            f"{self.num_timesteps} decisions: {result.makespan_s:.0f} s, "
            f"{100 * result.violation_ratio:.2f} % violations "
            f"({100 * result.expected_violation_ratio:.2f} % to be expected, "
            f"{100 * result.varied_violation_ratio:.2f} % with drawn physics), "
            f"{100 * result.completed:.0f} % "
            "completed (selection traces, simulated)",
            flush=True,
        )
        metadata = self._metadata(result)
        save_checkpoint(self._ppo, self.folder / "last.zip", metadata)
        self.logger.record("allocation/gantt", self._picture())
        save_checkpoint(
            self._ppo,
            self.folder / "checkpoints" / f"step_{self.num_timesteps:010d}.zip",
            metadata,
        )
        if self.best is None or result < self.best:
            self.best = result
            save_checkpoint(self._ppo, self.folder / "best.zip", metadata)
        return result

    def _picture(self) -> Figure:
        """Who held which vCPU when, on the first selection trace."""
        from training.evaluation.plots import gantt_picture  # matplotlib takes its time

        scenario = self.factory.scenario
        (seed,) = trace_seeds(SELECTION_ENTROPY, 1, "selection")
        recorder = TimelineRecorder(scenario)
        run_episode(
            SimulatedMachine(self.factory),
            PPOPolicy.from_checkpoint(self.folder / "last.zip"),
            EpisodeStart(seed, SELECTION_ENTROPY),
            recorder=recorder,
        )
        return Figure(gantt_picture(recorder.recording, scenario), close=False)

    def _metadata(self, score: Score) -> dict[str, Any]:
        evaluation = {
            "traces": "selection",
            "episodes": self.recipe.selection_episodes,
            **asdict(score),
        }
        metadata = describe(self._ppo, self.factory.scenario, self.factory.profile, evaluation)
        metadata["recipe"] = self.recipe.model_dump(mode="json")
        return metadata


class ProgressLine(BaseCallback):
    """
    A progress bar with the latest figures.

    :param evaluation: the callback that the figures come from
    :param total: decisions at the end of this run
    """

    def __init__(self, evaluation: Evaluation, total: int):
        super().__init__()
        self.evaluation = evaluation
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self._task = self._bar.add_task("training", total=total, figures="")

    def _on_training_start(self) -> None:
        self._bar.start()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        best = self.evaluation.best
        figures = (
            f"best {best.makespan_s:.0f} s, {100 * best.violation_ratio:.2f} % violations"
            if best
            else ""
        )
        self._bar.update(self._task, completed=self.num_timesteps, figures=figures)

    def _on_training_end(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing, also after an interruption."""
        self._bar.update(self._task, completed=self.num_timesteps)
        self._bar.stop()


class TrainingTime(BaseCallback):
    """
    Ends the training, within a rollout, once its time is up.

    :param until_s: when that is, on the monotonic clock [s]
    """

    def __init__(self, until_s: float):
        super().__init__()
        self._until_s = until_s

    def _on_step(self) -> bool:
        return time.monotonic() < self._until_s
