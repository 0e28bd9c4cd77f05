"""A short real training run: it learns, writes what it promises, resumes and survives Ctrl-C."""

import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import Logger

from agents.checkpoint import read_checkpoint
from agents.ppo.network import MaskedNetwork
from env.errors import InputError
from env.reward import TERMS, VIOLATION_WEIGHT
from env.scenario import load_scenario
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from env.simulator.vector_env import ColocationVecEnv
from training.ppo.adam import Adam
from training.ppo.callbacks import EpisodeLog
from training.ppo.selection import ACCEPTED_VARIED_RATIO, SELECTION_ENTROPY, run_selection, score
from training.ppo.training_run import new_model, resumed_model, train
from training.recipe import RECIPE_FOLDER, any_recipe, load_recipe

ROOT = Path(__file__).resolve().parents[3]
SMALL = load_recipe("default").model_copy(
    update={
        "n_envs": 64,
        "n_steps": 64,
        "batch_size": 1024,
        "steps": 60_000,
        "evaluate_every": 25_000,
        "selection_episodes": 4,
    }
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, train(load_scenario("cca-2025"), SMALL, 3, folder)


def test_a_run_leaves_best_last_and_periodic_checkpoints(run):
    folder, best = run
    assert read_checkpoint(folder / "best.zip").metadata["evaluation"]["makespan_s"] == (
        pytest.approx(best.makespan_s)
    )
    assert read_checkpoint(folder / "last.zip").metadata["steps"] >= SMALL.steps
    assert len(list((folder / "checkpoints").glob("step_*.zip"))) >= 2


def test_tensorboard_shows_episodes_jobs_actions_rewards_and_the_gantt_picture(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run[0] / "tensorboard"))
    events.Reload()
    scalars, images = events.Tags()["scalars"], events.Tags()["images"]
    for wanted in ("selection/makespan_s", "selection/violation_ratio", "actions/keep"):
        assert wanted in scalars
    assert "allocation/gantt" in images


def test_every_rollout_logs_its_episodes_their_jobs_and_reward_terms():
    scenario = load_scenario("cca-2025")
    environments = ColocationVecEnv(scenario, 8, 1.0)
    begin = environments.factory.begin

    def begin_smaller(hosts, targets, index, trace_seed, rng):
        begin(hosts, targets, index, trace_seed, rng)
        hosts["work_left_s"][index] *= 0.02

    environments.factory.begin = begin_smaller
    model = new_model(SMALL.model_copy(update={"n_envs": 8, "n_steps": 256}), environments, 0)
    logger = Logger(None, [])
    model.set_logger(logger)
    written = {}
    logger.dump = lambda step: written.update(logger.name_to_value)
    model.learn(8 * 256, callback=EpisodeLog(), log_interval=1)
    terms = [f"reward/{term}" for term in TERMS]
    jobs = [f"jobs/{name}_s" for name in scenario.job_names]
    for wanted in ("episode/makespan_s", "episode/violation_ratio", *jobs, *terms):
        assert math.isfinite(written[wanted])
    assert sum(written[term] for term in terms) < 0.0 < written["episode/makespan_s"] < 200.0


def test_resume_goes_on_from_the_step_it_left(run, tmp_path):
    again = SMALL.model_copy(update={"steps": 8_000})
    train(load_scenario("cca-2025"), again, 3, tmp_path, resume=run[0] / "last.zip")
    before = read_checkpoint(run[0] / "last.zip").metadata["steps"]
    assert read_checkpoint(tmp_path / "last.zip").metadata["steps"] >= before + 8_000


def test_a_run_that_goes_on_in_its_folder_keeps_its_best_until_it_is_beaten(run, tmp_path):
    """What is resumed is far worse than the best that lies there."""
    best = shutil.copy(ROOT / "checkpoints" / "best.zip", tmp_path / "best.zip")
    known = Path(best).read_bytes()
    short = SMALL.model_copy(update={"steps": 4_096})
    score = train(load_scenario("cca-2025"), short, 3, tmp_path, resume=run[0] / "last.zip")
    assert Path(best).read_bytes() == known
    assert (
        score.makespan_s
        < read_checkpoint(tmp_path / "last.zip").metadata["evaluation"]["makespan_s"]
    )


def test_a_resumed_model_learns_as_the_recipe_says_from_episodes_it_has_not_seen(run):
    scenario, checkpoint = load_scenario("cca-2025"), read_checkpoint(run[0] / "last.zip")
    recipe = SMALL.model_copy(update={"batch_size": 512, "clip_range": 0.1, "learning_rate": 1e-4})
    first = ColocationVecEnv(scenario, SMALL.n_envs, SMALL.gamma, seed=3).reset()
    environments = ColocationVecEnv(scenario, SMALL.n_envs, SMALL.gamma, seed=3)
    model = resumed_model(checkpoint, recipe, environments, 3)
    assert model.batch_size == 512
    assert model.clip_range(1.0) == 0.1
    begun = checkpoint.metadata["steps"]
    remaining = 1.0 - begun / (begun + recipe.steps)  # as Stable-Baselines3 counts
    assert model.lr_schedule(remaining) == pytest.approx(1e-4)
    assert model.lr_schedule(0.0) == pytest.approx(recipe.final_learning_rate)
    assert (environments.reset() != first).any()


def test_resume_refuses_what_is_not_a_checkpoint(tmp_path):
    (tmp_path / "text.zip").write_text("nothing")
    with pytest.raises(InputError, match=r"text\.zip"):
        train(load_scenario("cca-2025"), SMALL, 0, tmp_path, resume=tmp_path / "text.zip")


def test_a_selection_trace_is_run_as_if_alone():
    """Whoever else is in the batch, and as one machine does."""
    factory = EpisodeFactory(load_scenario("cca-2025"))
    actor = MaskedNetwork(read_checkpoint("best.zip").layers)
    many = run_selection(actor, factory, 4)
    assert run_selection(actor, factory, 2) == many[:2]
    machine, row = SimulatedMachine(factory), np.zeros(factory.observation_size, np.float32)
    (seed,) = trace_seeds(SELECTION_ENTROPY, 1, "selection")
    machine.begin(seed, np.random.default_rng([SELECTION_ENTROPY, seed]))
    ended = 0
    while not ended:
        machine.observe(row)
        ended, _ = machine.step(int(actor.act(row)), 1.0)
    assert machine.summary() == many[0]


def scored(makespan_s, violation_ratio, varied_ratio=0.0, expected_ratio=0.0):
    plain = {
        "makespan_s": makespan_s,
        "violation_ratio": violation_ratio,
        "expected_violation_ratio": expected_ratio,
        "completed": True,
    }
    return score([plain], [plain | {"violation_ratio": varied_ratio}])


def test_few_violations_beat_speed_and_speed_decides_among_the_accepted():
    slow_and_safe = scored(700.0, 0.001)
    fast_and_safe = scored(600.0, 0.002)
    fast_and_bad = scored(500.0, 0.05)
    assert min(slow_and_safe, fast_and_safe, fast_and_bad) is fast_and_safe
    assert slow_and_safe < fast_and_bad


def test_violations_on_varied_traces_cost_what_the_reward_charges():
    calm, accepted = scored(600.0, 0.0, 0.0), scored(600.0, 0.0, ACCEPTED_VARIED_RATIO)
    assert calm.cost_s == accepted.cost_s == 600.0
    assert scored(600.0, 0.0, 0.02).cost_s == pytest.approx(600.0 * (1.0 + 0.02 * VIOLATION_WEIGHT))
    assert scored(516.0, 0.0, 0.020) < scored(575.0, 0.0, 0.017)


def test_violations_to_be_expected_cost_the_same_however_few():
    near = scored(570.0, 0.0, expected_ratio=0.032)
    assert near.cost_s == pytest.approx(570.0 * (1.0 + 0.032 * VIOLATION_WEIGHT))
    assert scored(590.0, 0.0, expected_ratio=0.012) < near


def test_ctrl_c_before_there_is_something_to_save_is_one_line(tmp_path):
    options = ["--recipe", "best", "--out", str(tmp_path / "run")]
    command = [sys.executable, str(ROOT / "train.py"), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as training:
        assert training.stdout.readline() == "searching for a schedule to imitate\n"
        training.send_signal(signal.SIGINT)
        _, said = training.communicate(timeout=60)
    assert training.returncode == 130
    assert said == f"stopped; {tmp_path / 'run'} has what was saved so far, if anything\n"


def test_ctrl_c_saves_and_exits_cleanly(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("training for"):
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (tmp_path / "run" / "last.zip").exists()


FIRST_UPDATE = """
import sys
from env.scenario import load_scenario
from env.simulator.vector_env import ColocationVecEnv
from training.ppo.training_run import new_model
from training.recipe import load_recipe

recipe = load_recipe("default").model_copy(update={"n_steps": 2})
new_model(recipe, ColocationVecEnv(load_scenario("cca-2025"), 8, 1.0), 0).learn(16)
print(*sys.modules)
"""


def test_training_starts_without_what_takes_seconds_to_import():
    shown = subprocess.run(
        [sys.executable, "-c", FIRST_UPDATE], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert not {"torch._dynamo", "matplotlib", "pandas", "scipy.stats"} & set(shown.stdout.split())


def test_our_adam_is_torchs():
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.ones(5, 3))] for _ in range(2))
    mine, reference = Adam(ours, 1e-2), torch.optim.Adam(theirs, 1e-2, eps=1e-5)
    for step in range(6):
        if step == 3:  # as a resumed run does
            mine, state = Adam(ours, 1e-3), mine.state_dict()
            mine.load_state_dict(state)
        gradient = torch.randn(5, 3)
        for parameters, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            assert parameters[0].grad is None
            parameters[0].grad = gradient.clone()
            optimizer.step()
        torch.testing.assert_close(ours, theirs)


GENERAL = (RECIPE_FOLDER / "general.yaml").read_text()
BEST = (RECIPE_FOLDER / "best.yaml").read_text()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("[64, 64]", "[64, 64"), "mine.yaml: not valid YAML at line"),
        (lambda text: text + "most_load: [0.5, 1.5]\n", "most_load.1: .*less than or equal to 1"),
        (lambda text: "", "mine.yaml: .*must be a mapping; allowed are steps, "),
        (lambda text: text + "imitation: true\n", "mine.yaml: imitation: must be a mapping"),
        (
            lambda text: text + "imitation: {calm: 1}\n",
            "unknown field; .* in imitation search_traces,",
        ),
        (
            lambda text: GENERAL.replace("heads: 4", "heads: 3"),
            "network: .*width 80 is no multiple of 3 heads",
        ),
        (lambda text: BEST.replace("[4, 4, 8]", "[]"), "imitation.epochs: .*at least 1"),
        (lambda text: BEST.replace("unprobed: 0.65", "unprobed: 1.5"), "imitation.unprobed: "),
        (
            lambda text: BEST.replace("  search_evaluations: 9000\n", ""),
            "imitation.search_evaluations: ",
        ),
        (
            lambda text: GENERAL.replace("prices:", "imitation:"),
            "imitation: unknown field; allowed are steps, .* in prices episodes, lists,",
        ),
        (lambda text: GENERAL.replace("  epochs: 20\n", ""), "prices.epochs: "),
        (
            lambda text: text + "scenarios: [cca-2025]\n",
            "n_envs: unknown field; allowed are .* scenarios_share, ",
        ),
        (lambda text: text + "prices: {}\n", "prices: unknown field; .* in imitation "),
    ],
)
def test_a_recipe_that_is_none_is_named_in_one_line(change, says, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(change((RECIPE_FOLDER / "default.yaml").read_text()))
    with pytest.raises(InputError, match=says) as fault:
        any_recipe(path)
    assert "\n" not in str(fault.value)


def test_who_trains_on_one_scenario_refuses_a_recipe_for_any():
    with pytest.raises(InputError, match="general: for any scenario; allowed is a recipe for one"):
        load_recipe("general")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--scenario", "nowhere"], "nowhere"),
        (["--recipe", "nowhere"], "cannot be read as a recipe: no such file"),
        (["--steps", "0"], "--steps"),
        (["--recipe", "general", "--fast"], "--fast: for a recipe of one scenario only"),
        (["--env", "vmm"], "--env"),
        (["--resume", "nowhere.zip"], "no such checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(options, says, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--out", str(tmp_path / "run"), *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
