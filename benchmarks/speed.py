"""
How fast is it? Measured beside what is asked.

    python -m benchmarks.speed --json speed.json
    python -m benchmarks.speed --learning-curves docs/figures

Steps of the environment are timed inside this process, training in processes of its own:
stock PPO and `FastPPO` in turn, so that a busy machine slows both. Medians are reported. Decisions
of the network for any scenario are those of a simulated episode, without a pause between them; of
each episode `DECISION_QUANTILE` is taken.

`env_steps_per_s_core` takes the actions that the shipped checkpoint chooses in each state, or,
while there is none, a legal random edit with probability 0.05 and `keep` otherwise; choosing
them is not timed, observation, mask and reward are. A step lasts until something happens, a second
at most, so `simulated_s_per_s_core` says what the steps are worth.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from deploy.linux.helpers import helper_command
from env.errors import exit_on_bad_input
from env.inputs.commandline import (
    OneLineParser,
    require_folder,
    require_writable,
    whole_number,
    write_json,
)
from training.statistics import mean_and_ci95

CHECKPOINT = Path("checkpoints/best.zip")
BATCH = 1024
EDIT_PROBABILITY = 0.05

TRAINED = {"n_envs": 1024, "n_steps": 64, "batch_size": 4096, "n_epochs": 4}
"""What training is timed with, the rest being the default recipe: the setting of the targets."""

TARGETS: dict[str, tuple[str, float]] = {
    "env_steps_per_s_core": (">=", 3e6),
    "env_step_us_single": ("<=", 40.0),
    "ppo_steps_per_s": (">=", 140e3),
    "ppo_fast_steps_per_s": (">=", 220e3),
    "peak_training_memory_gib": ("<=", 2.0),
    "import_to_training_s": ("<=", 5.0),
    "decision_us_8_jobs_4_vcpus": ("<=", 400.0),
    "decision_us_20_jobs_16_vcpus": ("<=", 1500.0),
}
"""What is asked of each figure: at least, or at most."""

GENERAL = Path("checkpoints/general.zip")
DECIDED = {
    "decision_us_8_jobs_4_vcpus": "family-report-1-45",
    "decision_us_20_jobs_16_vcpus": "family-report-4-40",
}
"""The scenarios of the timed decisions: as many jobs and vCPUs, all jobs there from the start."""

DECISION_QUANTILE = 0.9
"""Of an episode's decisions: one takes the longer the more jobs are left."""

SIMULATED = "simulated_s_per_s_core"


# --- the environment ----------------------------------------------------------------------------


class RandomEdits:
    """
    Keeps the allocation, or now and then draws a legal edit.

    :param n_actions: length of the mask at the end of an observation
    """

    def __init__(self, n_actions: int):
        self.n_actions = n_actions
        self._rng = np.random.default_rng(0)

    def act(self, observation: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """
        Choose an edit in each state.

        :param observation: float32[..., size]
        :return: int64[...], index of each edit
        """
        legal = observation[..., -self.n_actions :]
        drawn = (legal * self._rng.random(legal.shape)).argmax(axis=-1)
        return np.where(self._rng.random(drawn.shape) < EDIT_PROBABILITY, drawn, 0)


def _action_stream(n_actions: int) -> tuple[Any, str]:
    """Who chooses the actions of the environment's benchmark, and how that is called."""
    from agents.checkpoint import find_checkpoint, read_checkpoint
    from agents.ppo.network import MaskedNetwork

    if find_checkpoint(CHECKPOINT).exists():
        return MaskedNetwork(read_checkpoint(CHECKPOINT).layers), str(CHECKPOINT)
    return RandomEdits(n_actions), f"legal random edits, probability {EDIT_PROBABILITY}"


def _batch_speed() -> tuple[float, float, str]:
    """Steps and simulated seconds per second of `ColocationVecEnv` on a core, and who acts."""
    from env.scenario import load_scenario
    from env.simulator.vector_env import ColocationVecEnv

    n_steps, warm_up = 300, 100
    environments = ColocationVecEnv(load_scenario("cca-2025"), BATCH, gamma=1.0)
    actor, stream = _action_stream(len(environments.factory.table))
    observations = environments.reset()
    spent = simulated = 0.0
    for step in range(warm_up + n_steps):
        environments.step_async(actor.act(observations))
        before_s = environments.hosts["now_s"].copy()
        began = time.perf_counter()
        observations, _, dones, _ = environments.step_wait()
        if step >= warm_up:
            spent += time.perf_counter() - began
            simulated += (environments.hosts["now_s"] - before_s)[~dones].sum()
    return n_steps * BATCH / spent, simulated / spent, stream


def _single_step_us() -> float:
    """Microseconds of one step of the Gymnasium environment."""
    import gymnasium
    from gymnasium import spaces

    n_steps = 5000
    environment = gymnasium.make("env.registration:coretide/Colocation-v0")
    assert isinstance(environment.action_space, spaces.Discrete)
    actor = RandomEdits(int(environment.action_space.n))
    observation, _ = environment.reset(seed=0)
    spent = 0.0
    for _ in range(n_steps):
        edit = actor.act(observation)
        began = time.perf_counter()
        observation, _, terminated, truncated, _ = environment.step(edit)
        spent += time.perf_counter() - began
        if terminated or truncated:
            observation, _ = environment.reset()
    return 1e6 * spent / n_steps


def _decision_us(scenario: str) -> float:
    """Microseconds of a decision of the network for any scenario while most jobs are left."""
    import agents
    from benchmarks.baselines import TimedPolicy
    from env.scenario import FAMILY_ROOM, load_scenario
    from env.simulator.machine import EpisodeFactory, SimulatedMachine
    from training.evaluation.episodes import EpisodeStart, run_episode

    machine = SimulatedMachine(EpisodeFactory(load_scenario(scenario), room=FAMILY_ROOM))
    watch = TimedPolicy(agents.make(GENERAL))
    run_episode(machine, watch, EpisodeStart(1, 1))
    return 1e6 * float(np.quantile(watch.seconds, DECISION_QUANTILE))


# --- training -----------------------------------------------------------------------------------


def training_run(fast: bool, rollouts: int, threads: int) -> dict[str, float]:
    """
    Train in this process, which has done nothing else yet.

    :param fast: with `FastPPO`
    :param rollouts: how many, after one that is not timed
    :param threads: that torch uses
    :return: when the first environment step was taken, steps per second, peak memory
    """
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    from env.scenario import load_scenario
    from env.simulator.vector_env import ColocationVecEnv
    from training.ppo.training_run import new_model
    from training.recipe import load_recipe

    class Clock(BaseCallback):
        """Notes when steps and rollouts happen."""

        first_step = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.rollouts: list[float] = []

        def _on_step(self) -> bool:
            self.first_step = self.first_step or time.time()
            return True

        def _on_rollout_start(self) -> None:
            self.rollouts.append(time.perf_counter())

    torch.set_num_threads(threads)
    recipe = load_recipe("default").model_copy(update=TRAINED)
    scenario = load_scenario("cca-2025")
    environments = ColocationVecEnv(scenario, recipe.n_envs, recipe.gamma, threads=threads)
    if fast:
        from training.ppo.fast_ppo import FastPPO

        model = new_model(recipe, environments, 0, FastPPO)
    else:
        model = new_model(recipe, environments, 0)
    clock = Clock()
    rollout = recipe.n_envs * recipe.n_steps
    model.learn((1 + rollouts) * rollout, callback=clock)
    spent = time.perf_counter() - clock.rollouts[1]
    return {
        "first_step": clock.first_step,
        "steps_per_s": rollouts * rollout / spent,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _training_process(fast: bool, rollouts: int, threads: int) -> dict[str, float]:
    """`training_run` in a process of its own, with the seconds from its start to the first step."""
    trainer = "fast" if fast else "stock"
    options = ("--train", trainer, "--rollouts", str(rollouts), "--threads", str(threads))
    command = helper_command("benchmarks.speed", *options)
    began = time.time()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    result["import_to_training_s"] = result["first_step"] - began
    return result


# --- the report ---------------------------------------------------------------------------------


def measure(repetitions: int, rollouts: int, threads: int) -> dict[str, Any]:
    """
    Measure everything.

    :param repetitions: of each figure
    :param rollouts: of each training process
    :param threads: of each training process
    """
    samples: dict[str, list[float]] = {name: [] for name in (*TARGETS, SIMULATED)}
    _training_process(False, 1, threads)  # compiles the kernels
    _training_process(True, 1, threads)
    stream = ""
    for _ in range(repetitions):
        rate, simulated, stream = _batch_speed()
        samples["env_steps_per_s_core"].append(rate)
        samples[SIMULATED].append(simulated)
        samples["env_step_us_single"].append(_single_step_us())
        for figure, scenario in DECIDED.items():
            samples[figure].append(_decision_us(scenario))
        for fast, name in ((False, "ppo_steps_per_s"), (True, "ppo_fast_steps_per_s")):
            run = _training_process(fast, rollouts, threads)
            samples[name].append(run["steps_per_s"])
            samples["peak_training_memory_gib"].append(run["peak_gib"])
            samples["import_to_training_s"].append(run["import_to_training_s"])
    report: dict[str, Any] = {name: float(np.median(values)) for name, values in samples.items()}
    report["peak_training_memory_gib"] = max(samples["peak_training_memory_gib"])
    report["targets"] = {name: f"{sign} {value:g}" for name, (sign, value) in TARGETS.items()}
    report["samples"] = samples
    report["conditions"] = {"actions": stream, "training_threads": threads} | TRAINED | conditions()
    return report


def conditions() -> dict[str, Any]:
    """What the figures depend on."""
    import numba
    import stable_baselines3
    import torch

    return {
        "batch": BATCH,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "torch": torch.__version__,
        "stable_baselines3": stable_baselines3.__version__,
    }


def show(report: dict[str, Any]) -> None:
    """
    Print measured beside asked.

    :param report: see `measure`
    """
    table = Table("figure", "measured", "asked", "met", title="speed and memory")
    for name, (sign, value) in TARGETS.items():
        measured = report[name]
        met = measured >= value if sign == ">=" else measured <= value
        table.add_row(name, f"{measured:,.4g}", f"{sign} {value:,.4g}", "yes" if met else "no")
    table.add_row(SIMULATED, f"{report[SIMULATED]:,.4g}", "", "")
    Console().print(table)
    Console().print(", ".join(f"{key} {value}" for key, value in report["conditions"].items()))


# --- the same learning curve? -------------------------------------------------------------------


def learning_curves(folder: Path, seeds: int, steps: int) -> dict[str, Any]:
    """
    Train stock PPO and `FastPPO` in turn and compare how they learn.

    :param folder: receives `learning_curves.json` and `learning_curves.png`
    :param seeds: 0 .. seeds - 1
    :param steps: decisions of each run
    """
    import torch
    from stable_baselines3 import PPO

    from training.ppo.fast_ppo import FastPPO

    torch.set_num_threads(1)  # stock PPO on two threads crawls if anything else runs
    runs: dict[str, list[dict[str, Any]]] = {"stock": [], "fast": []}
    for seed in range(seeds):
        for name, algorithm in (("stock", PPO), ("fast", FastPPO)):
            runs[name].append(learning_curve(algorithm, seed, steps))
            final = {key: round(value, 4) for key, value in runs[name][-1]["final"].items()}
            print(f"{name} {seed}: {final}", flush=True)
    report: dict[str, Any] = {"steps": steps, "seeds": list(range(seeds)), "runs": runs}
    for figure in ("makespan_s", "violation_ratio"):
        finals = {name: np.array([run["final"][figure] for run in runs[name]]) for name in runs}
        compared = finals | {"fast - stock": finals["fast"] - finals["stock"]}
        intervals = {name: mean_and_ci95(values.tolist()) for name, values in compared.items()}
        report[figure] = {
            name: {"mean": mean, "ci95": ci} for name, (mean, ci) in intervals.items()
        }
    write_json(report, folder / "learning_curves.json")
    plot(report, folder / "learning_curves.png")
    return report


def learning_curve(algorithm: Any, seed: int, steps: int) -> dict[str, Any]:
    """
    One run: what its training episodes score as it learns, and what its policy scores at the end.

    :param algorithm: stock PPO or `FastPPO`
    :param seed: of everything random
    :param steps: decisions
    """
    from stable_baselines3.common.callbacks import BaseCallback

    from env.scenario import load_scenario
    from env.simulator.machine import EpisodeFactory
    from env.simulator.vector_env import ColocationVecEnv
    from training.ppo.checkpoint_writing import network_of
    from training.ppo.selection import run_selection, score
    from training.ppo.training_run import new_model
    from training.recipe import load_recipe

    curve: dict[str, list[float]] = {"steps": [], "makespan_s": [], "violation_ratio": []}

    class Record(BaseCallback):
        """Means over the episodes that ended in each rollout."""

        def _on_rollout_start(self) -> None:
            self.ended: list[dict[str, Any]] = []

        def _on_step(self) -> bool:
            infos = self.locals["infos"]
            self.ended += [i["episode_summary"] for i in infos if "episode_summary" in i]
            return True

        def _on_rollout_end(self) -> None:
            if self.ended:
                curve["steps"].append(self.num_timesteps)
                for figure in ("makespan_s", "violation_ratio"):
                    mean = np.mean([summary[figure] for summary in self.ended])
                    curve[figure].append(round(float(mean), 5))

    scenario, recipe = load_scenario("cca-2025"), load_recipe("default")
    environments = ColocationVecEnv(scenario, recipe.n_envs, recipe.gamma, seed=seed)
    model = new_model(recipe, environments, seed, algorithm)
    began = time.perf_counter()
    model.learn(steps, callback=Record())
    seconds = time.perf_counter() - began
    factory, episodes = EpisodeFactory(scenario), recipe.selection_episodes
    result = score(run_selection(network_of(model), factory, episodes), [])
    final = {"makespan_s": result.makespan_s, "violation_ratio": result.violation_ratio}
    return {"seed": seed, "seconds": round(seconds, 1), "final": final, "curve": curve}


def plot(report: dict[str, Any], path: Path) -> None:
    """
    Draw the curves of all runs and their means.

    :param report: see `learning_curves`
    :param path: the picture to write (.png)
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    labels = {"makespan_s": "makespan [s]", "violation_ratio": "violation ratio"}
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        for colour, (algorithm, runs) in zip(("C0", "C1"), report["runs"].items(), strict=True):
            curves = [run["curve"] for run in runs if run["curve"]["steps"]]  # an episode ended
            for curve in curves:
                axis.plot(curve["steps"], curve[name], colour, lw=0.6, alpha=0.35)
            steps = sorted(set.intersection(*(set(curve["steps"]) for curve in curves)))
            mean = np.mean([np.interp(steps, c["steps"], c[name]) for c in curves], axis=0)
            end = report[name][algorithm]
            spread = "" if end["ci95"] is None else f" ± {end['ci95']:.2g}"
            end_label = f"{algorithm}: {end['mean']:.3g}{spread} at the end"
            axis.plot(steps, mean, colour, lw=2, label=end_label)
        axis.set(xlabel="decisions", ylabel=label)
        axis.legend()
    figure.suptitle(f"stock PPO and FastPPO, {len(report['seeds'])} seeds (simulated)")
    figure.savefig(path, dpi=90)


def main(argv: Sequence[str] | None = None) -> None:
    """
    Measure from the command line.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(prog="python -m benchmarks.speed", description=__doc__.splitlines()[1])
    add, count = line.add_argument, whole_number(1)
    add("--json", type=Path, help="write the figures here")
    add("--repetitions", type=count, default=3, help="of each figure (%(default)s)")
    add("--rollouts", type=count, default=5, help="of a training run (%(default)s)")
    threads = min(2, os.cpu_count() or 1)
    add("--threads", type=count, default=threads, help="of training (%(default)s)")
    add("--learning-curves", type=Path, metavar="DIR", help="compare the trainers")
    add("--seeds", type=count, default=5, help="of the learning curves (%(default)s)")
    add("--steps", type=count, default=1_000_000, help="of each curve (%(default)s)")
    add("--train", choices=["stock", "fast"], help=argparse.SUPPRESS)
    arguments = line.parse_args(argv)
    with exit_on_bad_input():
        require_writable(arguments.json)
        if arguments.learning_curves is not None:
            require_folder(arguments.learning_curves)
        if arguments.train:
            fast = arguments.train == "fast"
            print(json.dumps(training_run(fast, arguments.rollouts, arguments.threads)))
        elif arguments.learning_curves:
            report = learning_curves(arguments.learning_curves, arguments.seeds, arguments.steps)
            print(json.dumps({name: report[name] for name in ("makespan_s", "violation_ratio")}))
        else:
            report = measure(arguments.repetitions, arguments.rollouts, arguments.threads)
            show(report)
            if arguments.json:
                write_json(report, arguments.json)


if __name__ == "__main__":
    main()
