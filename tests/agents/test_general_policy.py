"""A network for any scenario: run by NumPy as torch has it, live as in the simulator."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import agents
from agents.array_archive import Arrays
from agents.checkpoint import WEIGHTS_ENTRY
from agents.general_checkpoint import is_general, read_general_checkpoint
from agents.ppo.attention_network import SingleAttention, shapes
from agents.ppo.general_policy import GeneralPolicy
from env.allocation import Allocation, JobAllocation, JobState
from env.errors import InputError
from env.reward import TERMS
from env.scenario import load_scenario
from env.sets.pointers import edits_of, legal_slots
from env.sets.tokens import Layout, token_table
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry
from training.general.attention import Sets
from training.general.attention_policy import AttentionPolicy, GeneralPPO
from training.general.machines import Group, MixedVecEnv
from training.general.writing import restore, save_general
from training.ppo.checkpoint_writing import _npz
from training.ppo.rollout_buffer import LeanRolloutBuffer

SCENARIO = load_scenario("cca-2025")


@pytest.fixture(scope="module")
def environments() -> MixedVecEnv:
    scenarios = [load_scenario(name) for name in ("cca-2025", "cca-2025-exclusive")]
    return MixedVecEnv(scenarios, each=16, seed=5)


def new_model(environments: MixedVecEnv) -> GeneralPPO:
    model = GeneralPPO(
        AttentionPolicy, environments, rollout_buffer_class=LeanRolloutBuffer, device="cpu",
        seed=5, n_steps=16, batch_size=256, n_epochs=1,
        policy_kwargs={"layout": environments.layout, "network": {"width": 32, "wide": 64}},
    )  # fmt: skip
    with torch.no_grad():  # a fresh policy has no opinions
        for parameter in model.policy.network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        model.policy.network.keep.bias.fill_(3.0)
    return model


@pytest.fixture(scope="module")
def model(environments: MixedVecEnv) -> GeneralPPO:
    model = new_model(environments)
    model.learn(512)
    return model


@pytest.fixture(scope="module")
def path(model: GeneralPPO, environments: MixedVecEnv, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("general") / "general.zip"
    save_general(model, path, [group.scenario for group in environments.groups], {})
    return path


def test_numpy_scores_like_torch(model: GeneralPPO, environments: MixedVecEnv, path: Path) -> None:
    arrays = read_general_checkpoint(path).arrays
    observations = environments.reset()
    for _ in range(30):
        sets = Sets(observations, environments.layout)
        with torch.no_grad():
            logits = model.policy.network(sets)[0].numpy()
        for index in range(0, len(observations), 5):
            table = environments.groups[index // environments.each].tokens
            network = SingleAttention(arrays, table)
            network.row[:] = observations[index]
            legal = sets.legal[index, table.slot_of] > 0.5
            theirs = logits[index, table.slot_of][legal]
            assert network.scores()[legal] == pytest.approx(theirs, abs=2e-5)
        actions, _ = model.predict(observations, deterministic=False)
        observations = environments.step(actions)[0].copy()


def test_room_for_more_changes_no_score(model: GeneralPPO) -> None:
    scores = []
    for layout in (Layout(7, 4), Layout(20, 16)):
        group = Group(EpisodeFactory(SCENARIO), 1, layout)
        group.begin(0, 7, np.random.default_rng(7))
        row = np.zeros(layout.size, np.float32)
        group.observe(0, row)
        sets = Sets(row[None], layout)
        with torch.no_grad():
            scores.append(model.policy.network(sets)[0].numpy()[0, group.tokens.slot_of])
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_the_gradient_is_that_of_the_scores(model: GeneralPPO, environments: MixedVecEnv) -> None:
    """Against differences along a direction, for all weights at once."""
    network = copy.deepcopy(model.policy.network)
    sets = Sets(environments.reset(), environments.layout)
    weights = torch.from_numpy(sets.legal) * torch.randn(sets.legal.shape)

    def loss() -> torch.Tensor:
        logits, values = network(sets)
        return (weights * torch.tanh(logits)).sum() + values.square().sum()

    parameters = list(network.parameters())
    found = torch.autograd.grad(loss(), parameters)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        direction = [torch.randn(p.shape, generator=generator) for p in parameters]
        slope = sum(float((g * d).sum()) for g, d in zip(found, direction, strict=True))
        losses = []
        with torch.no_grad():
            for step in (3e-4, -3e-4):
                for p, d in zip(parameters, direction, strict=True):
                    p += step * d
                losses.append(float(loss()))
                for p, d in zip(parameters, direction, strict=True):
                    p -= step * d
        assert (losses[0] - losses[1]) / 6e-4 == pytest.approx(slope, rel=0.02, abs=1.0)


def test_the_policy_protocol_runs_the_same_episode_as_the_kernel(path: Path) -> None:
    policy = agents.make(path)
    assert isinstance(policy, GeneralPolicy)
    through = SimulatedMachine(EpisodeFactory(SCENARIO))
    through.begin(4711, np.random.default_rng(1))
    policy.reset(SCENARIO)
    layout = Layout(7, 4)
    group = Group(EpisodeFactory(SCENARIO), 1, layout)
    group.begin(0, 4711, np.random.default_rng(1))
    network = SingleAttention(read_general_checkpoint(path).arrays, group.tokens)
    edit_of = edits_of(group.tokens.slot_of, layout.slots)
    row = np.zeros((1, layout.size), np.float32)
    group.observe(0, row[0])
    terms, reward, ended = np.zeros((1, len(TERMS))), np.zeros(1, np.float32), np.zeros(1, np.int64)
    legal = np.zeros(len(layout.slots), np.float32)
    for _ in range(400):
        network.row[:] = row[0]
        legal_slots(row[0], layout.offsets, legal)
        penalty = np.where(legal[group.tokens.slot_of] > 0.5, 0.0, -np.inf).astype(np.float32)
        slot = group.tokens.slot_of[network.choose(penalty)]
        assert edit_of[slot] >= 0
        group.step(slice(0, 1), np.array([slot]), terms, reward, ended, row)
        through.apply(policy.decide(through.telemetry()))
        through.advance(through.telemetry().time_s + policy.period_s, wake=policy.wakes)
        for field in ("now_s", "work_left_s", "service", "cores", "weight", "state", "qps"):
            assert np.array_equal(group.hosts[0][field], getattr(through.host, field)), field
        if ended[0]:
            break


def test_it_runs_scenarios_of_any_size(path: Path) -> None:
    """On machines that show nothing but that time passes, it starts jobs that are all legal."""
    checkpoint = read_general_checkpoint(path)
    for name in ("local", "prm-2020", "cca-2024"):
        policy = GeneralPolicy(checkpoint, "general")
        scenario = load_scenario(name)
        policy.reset(scenario)
        applied = Allocation(
            scenario.service.core_choices[-1], dict.fromkeys(scenario.job_names, JobAllocation())
        )
        for step in range(30):
            shown = Telemetry(
                time_s=0.5 * step,
                service=ServiceTelemetry(0.0, 0.0, 0.0, 1000.0 * math.sin(step) ** 2, 0.1),
                vcpu_busy_s=(0.1 * step,) * scenario.machine.vcpus,
                jobs={
                    job: JobTelemetry(allocated.state, 0.1 * step)
                    for job, allocated in applied.jobs.items()
                },
                applied=applied,
            )
            applied = policy.decide(shown).validate(scenario)
        assert any(job.state is not JobState.PENDING for job in applied.jobs.values())


def test_training_goes_on_where_it_stopped(
    model: GeneralPPO, environments: MixedVecEnv, path: Path
) -> None:
    resumed = new_model(environments)
    restore(resumed, path)
    assert resumed.num_timesteps == model.num_timesteps
    pairs = zip(model.policy.network.parameters(), resumed.policy.network.parameters(), strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)
        state, restored = model.policy.optimizer.state[one], resumed.policy.optimizer.state[other]
        assert torch.equal(state["exp_avg_sq"], restored["exp_avg_sq"])


def test_it_is_small_enough(model: GeneralPPO) -> None:
    widest = GeneralPPO(
        AttentionPolicy, model.env, device="cpu", n_steps=16, batch_size=256,
        policy_kwargs={"layout": model.env.layout},
    )  # fmt: skip
    assert sum(p.numel() for p in widest.policy.parameters()) <= 200_000


def damaged(path: Path, tmp_path: Path, arrays: Arrays) -> Path:
    copy = tmp_path / "damaged.zip"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(copy, "w") as other:
        for name in whole.namelist():
            content = _npz(arrays) if name == WEIGHTS_ENTRY else whole.read(name)
            other.writestr(name, content)
    return copy


def test_arrays_that_do_not_fit_are_refused(path: Path, tmp_path: Path) -> None:
    arrays = dict(read_general_checkpoint(path).arrays)
    assert is_general(path)
    for name in ("embed_0_weight", "biases_1", "look_0_bias", "there"):
        fewer = {key: value for key, value in arrays.items() if key != name}
        other = arrays | {name: np.zeros((3, 3, 3), np.float32)}
        for wrong in (fewer, other):
            with pytest.raises(InputError, match="not those of an attention network"):
                read_general_checkpoint(damaged(path, tmp_path, wrong))
    assert shapes(arrays) == {name: array.shape for name, array in arrays.items()}


def test_a_specialist_is_not_taken_for_it() -> None:
    assert not is_general("best.zip")
    with pytest.raises(InputError, match="not a checkpoint for any scenario"):
        read_general_checkpoint("best.zip")
    assert not is_general("nowhere.zip")


def test_running_it_imports_neither_torch_nor_numba(path: Path) -> None:
    code = (
        "import sys, agents; from env.scenario import load_scenario;"
        f"policy = agents.make({str(path)!r}); policy.reset(load_scenario('cca-2025'));"
        "print(sorted({'torch', 'numba', 'gymnasium', 'stable_baselines3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert token_table(SCENARIO, Layout(7, 4)).blank.any()
