"""A network for any scenario: run by NumPy as torch has it, live as in the simulator."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import configure

import agents
from agents.array_archive import Arrays
from agents.checkpoint import CHECKPOINT_FOLDER, METADATA_ENTRY, WEIGHTS_ENTRY
from agents.general_checkpoint import is_general, read_general_checkpoint
from agents.ppo.attention_network import SingleAttention, shapes
from agents.ppo.general_policy import GeneralPolicy
from env.allocation import Allocation, JobAllocation, JobState
from env.errors import InputError
from env.scenario import MAX_JOBS, MAX_VCPUS, Scenario, load_scenario
from env.sets.tokens import Layout, token_table
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry
from training.evaluation.episodes import EpisodeStart, run_episode
from training.general.attention import Sets
from training.general.branched_ppo import BranchedPPO
from training.general.branching import Explorer
from training.general.machines import Machines, Setup
from training.general.writing import restore, save_general
from training.ppo.checkpoint_writing import _npz
from training.recipe import GeneralRecipe, Network, any_recipe

SCENARIO = load_scenario("cca-2025")


def setup(scenario: Scenario, layout: Layout) -> Setup:
    return Setup(EpisodeFactory(scenario), layout)


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    scenarios = [load_scenario(name) for name in ("cca-2025", "cca-2025-exclusive")]
    return Explorer([setup(scenario, Layout(7, 4)) for scenario in scenarios], 0.5, 5, 1)


def new_model(explorer: Explorer, **changes: Any) -> BranchedPPO:
    recipe = any_recipe("general")
    assert isinstance(recipe, GeneralRecipe)
    recipe = recipe.model_copy(update=changes)
    return BranchedPPO(explorer=explorer, recipe=recipe, device="cpu", seed=5)


def narrow(explorer: Explorer) -> BranchedPPO:
    """A small one with opinions, which a fresh policy has not."""
    network = Network(width=32, heads=4, wide=64, layers=2)
    model = new_model(explorer, network=network, scenarios=("a", "b"), episodes=16, lists=4)
    with torch.no_grad():
        for parameter in model.policy.network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def model(explorer: Explorer) -> BranchedPPO:
    model = narrow(explorer)
    model.set_logger(configure(None, []))
    model.learn(64)
    return model


@pytest.fixture(scope="module")
def path(model: BranchedPPO, explorer: Explorer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("general") / "general.zip"
    save_general(model, path, [one.scenario for one in explorer.setups], {})
    return path


def test_numpy_scores_like_torch(model: BranchedPPO, explorer: Explorer, path: Path) -> None:
    arrays = read_general_checkpoint(path).arrays
    machines = explorer.begin(np.arange(32) % 2)
    for _ in range(8):
        observations = explorer.observe(machines)
        with torch.no_grad():
            logits = model.policy.network(Sets(observations, explorer.layout)).numpy()
        for index in range(0, len(observations), 5):
            network = SingleAttention(arrays, machines.setup(index).tokens)
            network.row[:] = observations[index]
            assert network.scores() == pytest.approx(logits[index], abs=5e-5)
        lists, _ = model.predict(observations, deterministic=False)
        explorer.follow(machines, lists, to_the_end=False)


def test_stable_baselines_loads_it(model: BranchedPPO, explorer: Explorer, path: Path) -> None:
    loaded = BranchedPPO.load(path, device="cpu")
    observations = explorer.observe(explorer.begin(np.arange(32) % 2))
    theirs, _ = loaded.predict(observations, deterministic=True)
    assert (theirs == model.policy.best(observations)).all()
    drawn = {tuple(loaded.predict(observations, deterministic=False)[0]) for _ in range(3)}
    assert len(drawn) == 3


def test_room_for_more_changes_no_score(model: BranchedPPO) -> None:
    scores = []
    for layout in (Layout(7, 4), Layout(20, 16)):
        machines = Machines([setup(SCENARIO, layout)], 1)
        machines.begin(0, 0, 7, np.random.default_rng(7))
        row = np.zeros(layout.size, np.float32)
        machines.observe(slice(None), row[None])
        with torch.no_grad():
            scores.append(model.policy.network(Sets(row[None], layout)).numpy()[0])
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_numpy_scores_like_torch_on_a_machine_of_as_many_vcpus_as_may_be(
    model: BranchedPPO, path: Path
) -> None:
    drawn = load_scenario("family-report-1-12")
    assert len(drawn.jobs) == 19
    pairs = [[vcpu, vcpu + 1] for vcpu in range(0, MAX_VCPUS, 2)]
    wide = drawn.with_changes(machine={"vcpus": MAX_VCPUS, "smt_siblings": pairs})
    layout = Layout(MAX_JOBS, MAX_VCPUS)
    table = token_table(wide, layout)
    row = table.blank.copy()
    row[:3] = 1.0  # it may keep, and there are places on all vCPUs
    jobs_at, n_job = layout.offsets[6:8]
    for job in range(len(wide.jobs)):
        row[jobs_at + job * n_job + np.array([0, 3])] = 1.0  # it is pending, and can start
    sets = Sets(row[None], layout)
    with torch.no_grad():
        theirs = model.policy.network(sets).numpy()[0]
    network = SingleAttention(read_general_checkpoint(path).arrays, table)
    network.row[:] = row
    assert network.scores() == pytest.approx(theirs, abs=5e-5)


def test_the_gradient_is_that_of_the_scores(model: BranchedPPO, explorer: Explorer) -> None:
    """
    Against differences along a direction, for all weights at once.

    Directions are the gradient's, each weight's part times luck: along others the difference would
    be lost among float32's rounding.
    """
    network = copy.deepcopy(model.policy.network)
    sets = Sets(explorer.observe(explorer.begin(np.arange(32) % 2)), explorer.layout)
    weights = torch.randn(sets.legal.shape)

    def loss() -> torch.Tensor:
        return (weights * torch.tanh(network(sets))).double().sum()

    parameters = list(network.parameters())
    found = torch.autograd.grad(loss(), parameters)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        direction = [g * torch.rand(g.shape, generator=generator) for g in found]
        slope = sum(float((g * d).sum()) for g, d in zip(found, direction, strict=True))
        losses = []
        with torch.no_grad():
            for step in (1e-5, -1e-5):
                for p, d in zip(parameters, direction, strict=True):
                    p += step * d
                losses.append(float(loss()))
                for p, d in zip(parameters, direction, strict=True):
                    p -= step * d
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(slope, rel=0.02)


@pytest.mark.parametrize("name", ["cca-2025", "family-training-0-21"])
def test_the_policy_protocol_runs_the_same_episode_as_the_kernel(path: Path, name: str) -> None:
    """Also where jobs arrive on the way: then they are seen whole."""
    scenario = load_scenario(name)
    policy = agents.make(path)
    assert isinstance(policy, GeneralPolicy)
    through = SimulatedMachine(EpisodeFactory(scenario))
    through.begin(4711, np.random.default_rng(1))
    policy.reset(scenario)
    layout = Layout(7, scenario.machine.vcpus)
    machines = Machines([setup(scenario, layout)], 1)
    hosts, one = machines.hosts, slice(0, 1)
    machines.begin(0, 0, 4711, np.random.default_rng(1))
    network = SingleAttention(read_general_checkpoint(path).arrays, machines.setup(0).tokens)
    row = np.zeros((1, layout.size), np.float32)
    for _ in range(20):
        machines.observe(one, row)
        network.row[:] = row[0]
        machines.follow(one, np.array([network.choose(machines.legal[0])]))
        while through.telemetry().time_s < hosts["now_s"][0]:
            through.apply(policy.decide(through.telemetry()))
            through.advance(through.telemetry().time_s + policy.period_s, wake=policy.wakes)
        for field in ("now_s", "work_left_s", "service", "cores", "weight", "state", "qps"):
            assert np.array_equal(hosts[0][field], getattr(through.host, field)), field
        if machines.ended[0]:
            break
    assert machines.ended[0]


def waiting(scenario: Scenario, time_s: float, done: int = 0) -> Telemetry:
    """A machine on which the first jobs are done and none of the others has begun."""
    states = [JobState.DONE] * done + [JobState.PENDING] * (len(scenario.jobs) - done)
    jobs = dict(zip(scenario.job_names, states, strict=True))
    return Telemetry(
        time_s=time_s,
        service=ServiceTelemetry(0.0, 0.0, 0.0, 1000.0, 0.1),
        vcpu_busy_s=(0.0,) * scenario.machine.vcpus,
        jobs={name: JobTelemetry(state, 0.0) for name, state in jobs.items()},
        applied=Allocation((0, 1), {name: JobAllocation(state) for name, state in jobs.items()}),
    )


def test_it_goes_on_without_jobs_and_with_new_ones(path: Path) -> None:
    """As where a queue is empty for a while; its jobs arrive, and the tokens say so."""
    policy = GeneralPolicy(read_general_checkpoint(path), "general")
    policy.reset(SCENARIO.with_jobs(()))
    assert policy._blank[18] == 1.0
    for step, jobs in enumerate(((), SCENARIO.jobs[:2], ())):
        scenario = SCENARIO.with_jobs(jobs)
        policy.change_jobs(scenario)
        assert policy._blank[18] == 1.0
        shown = waiting(scenario, float(step))
        assert set(policy.decide(shown).validate(scenario).jobs) == {job.name for job in jobs}


def test_the_network_is_asked_when_jobs_come_or_go(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    choose = SingleAttention.choose

    def counted(network: SingleAttention, legal: np.ndarray) -> int:
        asked.append(1)
        return choose(network, legal)

    monkeypatch.setattr(SingleAttention, "choose", counted)
    policy = GeneralPolicy(read_general_checkpoint(path), "general")
    policy.reset(SCENARIO)

    for time_s in (0.0, 1.0, 2.0):
        policy.decide(waiting(SCENARIO, time_s))
    assert len(asked) == 1
    policy.change_jobs(SCENARIO)
    policy.decide(waiting(SCENARIO, 3.0))
    assert len(asked) == 1
    policy.decide(waiting(SCENARIO, 4.0, done=1))
    assert len(asked) == 2
    fewer = SCENARIO.with_jobs(SCENARIO.jobs[1:])
    policy.change_jobs(fewer)
    policy.decide(waiting(fewer, 5.0))
    assert len(asked) == 2  # who is done was gone already
    policy.change_jobs(SCENARIO)
    policy.decide(waiting(SCENARIO, 6.0))
    assert len(asked) == 3


def test_whoever_interrupts_its_answer_gets_one_the_next_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that is held up interrupts what is late; without a list no job would ever start."""
    policy = GeneralPolicy(read_general_checkpoint(path), "general")
    policy.reset(SCENARIO)
    shown = waiting(SCENARIO, 0.0)

    def late(network: SingleAttention, legal: np.ndarray) -> int:
        raise TimeoutError

    with monkeypatch.context() as held_up:
        held_up.setattr(SingleAttention, "choose", late)
        with pytest.raises(TimeoutError):
            policy.decide(shown)
    for _ in range(5):
        wished = policy.decide(shown)
    assert any(job.state is JobState.RUNNING for job in wished.jobs.values())


def test_it_runs_scenarios_of_any_size(path: Path) -> None:
    """On machines that show nothing but that time passes, it starts jobs that are all legal."""
    checkpoint = read_general_checkpoint(path)
    wide = load_scenario("prm-2020")
    many = wide.jobs[0].model_copy(update={"threads": (16, 17)})  # they share a token's number
    scenarios = [load_scenario(name) for name in ("local", "cca-2024")]
    for scenario in (*scenarios, wide, wide.model_copy(update={"jobs": (many, *wide.jobs[1:])})):
        policy = GeneralPolicy(checkpoint, "general")
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


def test_the_shipped_one_finishes_a_scenario_of_a_size_nobody_trained_on() -> None:
    scenario = load_scenario("family-report-1-15")  # 17 jobs on 12 vCPUs
    run = run_episode(
        SimulatedMachine(EpisodeFactory(scenario)), agents.make("general.zip"), EpisodeStart(7, 7)
    )
    assert (len(scenario.jobs), scenario.machine.vcpus) == (17, 12)
    assert run.completed
    assert run.violation_ratio < 0.05


def test_training_goes_on_where_it_stopped(
    model: BranchedPPO, explorer: Explorer, path: Path
) -> None:
    resumed = narrow(explorer)
    restore(resumed, path)
    assert resumed.num_timesteps == model.num_timesteps
    pairs = zip(model.policy.network.parameters(), resumed.policy.network.parameters(), strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)
        state, restored = model.policy.optimizer.state[one], resumed.policy.optimizer.state[other]
        assert torch.equal(state["exp_avg_sq"], restored["exp_avg_sq"])


def test_the_shipped_one_goes_on_learning(explorer: Explorer) -> None:
    shipped = CHECKPOINT_FOLDER / "general.zip"
    resumed = new_model(explorer, scenarios=("a", "b"), episodes=8, lists=4)
    resumed.set_logger(configure(None, []))
    restore(resumed, shipped)
    begun = resumed.num_timesteps
    assert begun == read_general_checkpoint(shipped).metadata["steps"]
    resumed.learn(32, reset_num_timesteps=False)
    assert resumed.num_timesteps >= begun + 32


def test_it_is_small_enough(explorer: Explorer) -> None:
    assert sum(one.numel() for one in new_model(explorer).policy.parameters()) <= 200_000


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
    for name in ("embed_0_weight", "biases_1", "qkv_0_bias", "answer_bias"):
        fewer = {key: value for key, value in arrays.items() if key != name}
        other = arrays | {name: np.zeros((3, 3, 3), np.float32)}
        headless = arrays | {"biases_0": np.zeros((0, 5), np.float32)}
        for wrong in (fewer, other, headless):
            with pytest.raises(InputError, match="not those of an attention network"):
                read_general_checkpoint(damaged(path, tmp_path, wrong))
    assert shapes(arrays) == {name: array.shape for name, array in arrays.items()}


@pytest.mark.parametrize("field", ["format", "tokens_version", "menu_version"])
def test_another_version_is_refused(path: Path, tmp_path: Path, field: str) -> None:
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(other, "w") as copied:
        for name in whole.namelist():
            content = whole.read(name)
            if name == METADATA_ENTRY:
                content = json.dumps(json.loads(content) | {field: 99}).encode()
            copied.writestr(name, content)
    with pytest.raises(InputError, match=f"{field} 99; this version reads"):
        read_general_checkpoint(other)


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
