"""Checkpoints: what is written can be run without torch, what is not ours is refused."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import agents
from agents.checkpoint import (
    CHECKPOINT_FOLDER,
    METADATA_ENTRY,
    WEIGHTS_ENTRY,
    read_checkpoint,
    shipped_for,
)
from agents.ppo.network import KnownMasks, MaskedNetwork
from agents.ppo.trained_policy import PPOPolicy
from env.action import edit_table, legal_edits
from env.control import ControlState
from env.errors import InputError
from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from env.simulator.vector_env import ColocationVecEnv
from training.ppo.checkpoint_writing import describe, save_checkpoint
from training.ppo.training_run import new_model
from training.recipe import load_recipe

SCENARIO = load_scenario("cca-2025")
TIE = 1e-5


@pytest.fixture(scope="module")
def model():
    recipe = load_recipe("default").model_copy(
        update={"n_envs": 32, "n_steps": 32, "batch_size": 1024}
    )
    environments = ColocationVecEnv(SCENARIO, recipe.n_envs, recipe.gamma, seed=5)
    model = new_model(recipe, environments, seed=5)
    with torch.no_grad():
        # A fresh policy keeps nearly always; this one has opinions.
        model.policy.action_net.weight.mul_(100.0)
        model.policy.action_net.bias.zero_()
    return model


@pytest.fixture(scope="module")
def metadata(model):
    return describe(model, SCENARIO, model.env.factory.profile, {"traces": "none"})


@pytest.fixture(scope="module")
def path(model, metadata, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "policy.zip"
    save_checkpoint(model, path, metadata)
    return path


def rollout_observations(model, count):
    seen = [model.env.reset()]
    while sum(map(len, seen)) < count:
        actions, _ = model.predict(seen[-1], deterministic=False)
        seen.append(model.env.step(actions)[0].copy())
    return np.concatenate(seen)[:count]


def test_numpy_acts_like_stable_baselines3_on_ten_thousand_observations(model, path):
    rng = np.random.default_rng(0)
    n_actions = model.action_space.n
    n_features = model.observation_space.shape[0] - n_actions
    random = rng.uniform(-1.0, 2.0, (5000, n_features + n_actions)).astype(np.float32)
    random[:, n_features:] = rng.random((5000, n_actions)) < 0.3
    random[:, n_features] = 1.0
    observations = np.concatenate([random, rollout_observations(model, 5000)])

    network = MaskedNetwork(read_checkpoint(path).layers)
    ours = network.act(observations)
    theirs, _ = model.predict(observations, deterministic=True)
    logits = np.where(
        observations[:, n_features:] > 0.5, network.logits(observations[:, :n_features]), -np.inf
    )
    two_best = np.sort(logits, axis=1)[:, -2:]
    tied = two_best[:, 1] - two_best[:, 0] <= TIE
    differ = ours != theirs
    assert not (differ & ~tied).any()
    assert differ.sum() <= 5  # ties, counted
    assert (np.take_along_axis(observations[:, n_features:], ours[:, None], 1) == 1.0).all()


def test_the_policy_protocol_runs_the_same_episode_as_the_environment(path):
    policy = agents.make(path)
    assert isinstance(policy, PPOPolicy)
    direct, through = (SimulatedMachine(EpisodeFactory(SCENARIO)) for _ in range(2))
    direct.begin(4711, np.random.default_rng(1))
    through.begin(4711, np.random.default_rng(1))
    row = np.zeros(direct.factory.observation_size, np.float32)
    policy.reset(SCENARIO)
    network = MaskedNetwork(read_checkpoint(path).layers)
    for _ in range(400):
        direct.observe(row)
        direct.step(int(network.act(row)), 1.0)
        through.apply(policy.decide(through.telemetry()))
        through.advance(through.telemetry().time_s + policy.period_s, wake=policy.wakes)
        for field in ("now_s", "work_left_s", "service", "cores", "weight", "state", "qps"):
            assert np.array_equal(getattr(direct.host, field), getattr(through.host, field)), field
        if direct.over:
            break


def test_a_saved_checkpoint_is_a_normal_stable_baselines3_model(model, path):
    from stable_baselines3 import PPO

    loaded = PPO.load(path, device="cpu")
    observations = rollout_observations(model, 200)
    assert np.array_equal(
        loaded.predict(observations, deterministic=True)[0],
        model.predict(observations, deterministic=True)[0],
    )


def test_running_a_checkpoint_imports_neither_torch_nor_numba(path):
    code = (
        "import sys, agents; agents.make(sys.argv[1]);"
        "print(sorted({'torch','numba','gymnasium','stable_baselines3'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def rewritten(path, target, changes):
    """A copy of a checkpoint with some entries replaced (None: left out)."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = changes.get(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({METADATA_ENTRY: None}, "not a coretide checkpoint"),
        ({WEIGHTS_ENTRY: None}, "not a coretide checkpoint"),
        ({METADATA_ENTRY: b"{"}, "truncated or damaged"),
        ({WEIGHTS_ENTRY: b"garbage"}, "truncated or damaged"),
        ({"observation_version": 99}, "observation version 99"),
        ({"format": 99}, "format 99"),
        ({"actions": ["keep"]}, "one output per action"),
    ],
)
def test_a_foreign_or_damaged_checkpoint_is_refused_in_one_line(path, tmp_path, change, says):
    entries = change
    if METADATA_ENTRY not in change and WEIGHTS_ENTRY not in change:
        with zipfile.ZipFile(path) as archive:
            content = json.loads(archive.read(METADATA_ENTRY))
        entries = {METADATA_ENTRY: json.dumps({**content, **change}).encode()}
    bad = rewritten(path, tmp_path / "bad.zip", entries)
    with pytest.raises(InputError, match=says) as caught:
        read_checkpoint(bad)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_and_a_missing_one_are_refused(path, tmp_path):
    short = tmp_path / "short.zip"
    short.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(InputError, match="truncated"):
        read_checkpoint(short)
    with pytest.raises(InputError, match=r"no such checkpoint; .*one of: best\.zip, cca-2024\.zip"):
        read_checkpoint(tmp_path / "nowhere.zip")
    with pytest.raises(InputError, match=r"is a folder; a checkpoint is a \.zip file"):
        read_checkpoint(tmp_path)


def test_a_checkpoint_of_another_scenario_is_refused(path):
    other = SCENARIO.with_changes(regulation={"share_service_cores": False})
    with pytest.raises(InputError, match="actions differ"):
        agents.make(path).reset(other)


@pytest.mark.parametrize("name", ["cca-2025-exclusive", "local"])
def test_a_refusal_names_the_shipped_checkpoint_that_fits(path, name):
    with pytest.raises(InputError, match=rf"; {name}\.zip fits \(--checkpoint {name}\.zip\)$"):
        agents.make(path).reset(load_scenario(name))


def test_an_edited_copy_of_its_scenario_needs_no_caution(path, capsys):
    policy = agents.make(path)
    agents.warn(policy, SCENARIO.with_changes(load={"interval_s": 5.0}))
    agents.warn(agents.make("static"), load_scenario("cca-2024"))
    assert capsys.readouterr().err == ""
    agents.warn(policy, load_scenario("cca-2024"))
    (said,) = capsys.readouterr().err.splitlines()
    assert "cca-2025" in said and "cca-2024" in said


def test_a_failed_save_leaves_the_good_checkpoint_alone(model, metadata, path, monkeypatch):
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(model, path, metadata)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["best.zip", "checkpoints/best.zip"])
def test_a_shipped_checkpoint_is_found_from_any_folder(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    policy = agents.make(name)
    assert policy.name == name
    assert policy.checkpoint.path == CHECKPOINT_FOLDER / "best.zip"


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("cca-2025", "best.zip"),
        ("cca-2024", "cca-2024.zip"),
        ("family-report-0-0", "general.zip"),
    ],
)
def test_a_scenario_gets_the_specialist_that_fits_or_the_policy_for_any(scenario, expected, capsys):
    assert shipped_for(load_scenario(scenario)) == f"checkpoints/{expected}"
    said = capsys.readouterr().err
    assert (said.count("\n") == 1 and scenario in said) == (expected == "general.zip")


def test_on_another_profile_a_scenario_gets_the_policy_for_any(capsys):
    """A specialist knows its own machine; the one for any is told what the profile says."""
    elsewhere = load_scenario("cca-2025").model_copy(update={"profile": "cca-2024"})
    assert shipped_for(elsewhere) == "checkpoints/general.zip"
    assert "scenario cca-2025 with its profile; general.zip" in capsys.readouterr().err


def test_a_queue_gets_the_policy_for_any_scenario_and_a_specialist_says_so(capsys):
    queue = load_scenario("cca-2025").with_jobs(())
    assert shipped_for(queue) == "checkpoints/general.zip"
    agents.warn(agents.make("general.zip"), queue)
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match="made for the jobs of cca-2025; a queue takes general"):
        agents.warn(agents.make("best.zip"), queue)


def test_the_shipped_checkpoint_fits_the_shipped_scenario():
    shipped = Path(__file__).resolve().parents[2] / "checkpoints" / "best.zip"
    if not shipped.exists():
        pytest.skip("no checkpoint is shipped yet")
    policy = agents.make(shipped)
    policy.reset(SCENARIO)


def known_mask(masks, control, rows):
    """The mask that is remembered, which must be the one that `legal_edits` makes."""
    legal = [0.0] * len(rows)
    legal_edits(control, rows, legal)
    known = masks.penalty(control) == 0.0
    assert known.tolist() == [value == 1.0 for value in legal]
    return known.tolist()


def test_a_known_mask_is_the_one_that_the_peaks_allow():
    """memcached's smaller sets open and close with the last second's peaks, and nothing else."""
    rows = edit_table(SCENARIO).rows.astype(object)
    control = ControlState.initial(SCENARIO, dict.fromkeys(SCENARIO.job_names, 100.0))
    masks, seen = KnownMasks(rows), []
    for control.peak_cpu_cores in (0.3, 1.4, 0.3):
        seen.append(known_mask(masks, control, rows))
    assert seen[0] == seen[2] != seen[1]


def test_a_known_mask_knows_whether_memcached_leaves_a_vcpu():
    unshared = load_scenario("local").with_changes(regulation={"share_service_cores": False})
    rows = edit_table(unshared).rows.astype(object)
    control = ControlState.initial(unshared, dict.fromkeys(unshared.job_names, 100.0))
    control.desired_service = 0b11
    masks, seen = KnownMasks(rows), []
    for control.service in (0b01, 0b11, 0b01):
        seen.append(known_mask(masks, control, rows))
    assert seen[0] == seen[2] != seen[1]
