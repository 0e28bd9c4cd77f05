"""This machine as an environment: real memcached under a real load, real jobs, a real trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium.utils.env_checker import check_env as gymnasium_check
from stable_baselines3.common.env_checker import check_env as sb3_check

import train
from agents.checkpoint import read_checkpoint
from deploy.demo import loaded
from deploy.engines import memcached
from deploy.linux import service_process
from deploy.linux.cgroups import find_groups
from deploy.records.recorder import read_events
from env.action import KIND
from env.codes import START
from env.errors import InputError
from env.reward import TERMS, UNIT_S
from env.scenario import load_scenario
from env.simulator.vector_env import ColocationVecEnv
from tests.live.conftest import JOBS, LONG, ROOT
from training.ppo.checkpoint_writing import describe, save_checkpoint
from training.ppo.training_run import new_model
from training.recipe import load_recipe

ID = "env.registration:coretide/ColocationVM-v0"
SHORT = ["stress-ng", "--cpu", "{threads}", "--cpu-method", "int64", "--cpu-ops", "400"]
SMALL = {"steps": 24, "n_steps": 12, "batch_size": 6, "n_epochs": 2}


@pytest.fixture
def scenario_file(scenario_file):
    """The two jobs' scenario; who keeps decides again soon, as fresh policies keep mostly."""

    def write(**commands):
        path = scenario_file(**commands)
        path.write_text(path.read_text().replace("hold_s: 1.0", "hold_s: 0.2"))
        return path

    return write


@pytest.fixture
def load(server, scenario_file, tmp_path):
    """A light load on memcached, from the last vCPU."""
    scenario = load_scenario(scenario_file()).with_changes(load={"qps_max": 4000})
    with loaded(server, scenario, tmp_path / "load.txt"):
        yield server


@pytest.fixture
def make(server, scenario_file, tmp_path):
    """Makes environments of the two jobs, which are closed with the test."""
    made = []

    def start(command=SHORT, **options):
        options = {"runtime": "process", "state": tmp_path / "state", **options}
        made.append(
            gymnasium.make(
                ID,
                scenario=scenario_file(dedup=command, radix=command),
                memcached=f"{server.host}:{server.port}",
                report=tmp_path / "episodes",
                gamma=1.0,
                **options,
            )
        )
        return made[-1]

    yield start
    for env in made:
        env.close()


def edit_named(env, words):
    table = env.unwrapped.table
    return next(edit for edit in range(len(table)) if table.describe(edit).startswith(words))


def startable(env):
    """The first edit that starts a job, or `keep`."""
    legal = np.flatnonzero(env.unwrapped.action_mask())
    starts = legal[env.unwrapped.table.rows[legal, KIND] == START]
    return int(starts[0]) if len(starts) else 0


def nonce_of(env):
    """What marks the control groups of the episode under way."""
    return env.unwrapped.backend._episode.machine.actuator.state.nonce


def assert_no_groups(nonce):
    assert find_groups(Path("/sys/fs/cgroup"), f"coretide-{nonce}-") == []


def assert_restored(server, tmp_path):
    everywhere = tuple(sorted(os.sched_getaffinity(0)))
    assert set(service_process.affinities(server.pid).values()) == {everywhere}
    assert not (tmp_path / "state" / "state.json").exists()
    names = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path / "state") not in names


def test_an_episode_to_its_end(make, load, tmp_path):
    env = make()
    observation, info = env.reset(seed=1)
    assert info == {}  # the load is somebody else's, and so is its trace
    assert env.observation_space.contains(observation)
    steps, smaller = [], edit_named(env, "service 0")
    give_up_s = time.monotonic() + 90.0
    while not env.unwrapped.action_mask()[smaller]:  # memcached was busier within the last second
        assert time.monotonic() < give_up_s
        steps.append(env.step(0))
    steps.append(env.step(smaller))
    assert set(service_process.affinities(load.pid).values()) == {(0,)}
    while not (steps[-1][2] or steps[-1][3]):
        assert time.monotonic() < give_up_s
        steps.append(env.step(startable(env)))
    assert steps[-1][2]
    assert_restored(load, tmp_path)
    assert_no_groups(nonce_of(env))
    summary = steps[-1][4]["episode_summary"]
    assert summary["completed"]
    assert summary["decisions"] == len(steps)
    assert summary["intervals"] >= 1
    ends = [job["end_s"] for job in summary["jobs"].values()]
    starts = [job["start_s"] for job in summary["jobs"].values()]
    assert summary["makespan_s"] == pytest.approx(max(ends) - min(starts))
    totals = {name: sum(step[4]["reward_terms"][name] for step in steps) for name in TERMS}
    assert summary["reward_terms"] == pytest.approx(totals)
    assert sum(step[1] for step in steps) == pytest.approx(sum(totals.values()))
    assert -UNIT_S * totals["time"] == pytest.approx(max(ends), abs=2.0)
    work_s = sum(env.unwrapped.backend._episode.control.job_work_s)
    assert totals["shaping"] == pytest.approx(work_s / UNIT_S)  # Phi begins at -work / (0.5 x 2)
    assert summary["actuations"] >= 3  # memcached's vCPU and two starts
    events = [(event.what, event.job) for event in read_events(tmp_path / "episodes" / "0001")]
    assert [events.count(("end", job)) for job in JOBS] == [1, 1]
    with pytest.raises(RuntimeError, match="reset first"):
        env.unwrapped.step(0)


def test_a_reset_in_mid_episode_begins_anew(make, load, tmp_path):
    env = make(LONG)
    env.reset()
    for _ in range(2):
        env.step(startable(env))
    env.step(0)
    env.step(edit_named(env, "service 0"))
    state = env.unwrapped.backend._episode.machine.actuator.state
    pids = [int(job.key.partition("-")[0]) for job in state.jobs.values()]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    first = nonce_of(env)
    fresh, _ = env.reset()
    assert_no_groups(first)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    everywhere = tuple(sorted(os.sched_getaffinity(0)))
    assert set(service_process.affinities(load.pid).values()) == {everywhere}
    mask = env.unwrapped.action_mask()
    assert all(mask[edit_named(env, f"start {job}")] for job in JOBS)
    assert fresh[7] == 0.0  # no edit yet since the load was first seen
    env.close()
    assert_restored(load, tmp_path)


def test_an_exception_leaves_the_machine_as_it_was_found(make, load, tmp_path):
    env = make(["sh", "-c", "exit 3"])
    env.reset()
    env.step(edit_named(env, "service 0"))
    with pytest.raises(InputError, match="given up, exit code 3"):
        for _ in range(200):
            env.step(startable(env))
    assert_restored(load, tmp_path)


def test_without_readings_an_episode_is_cut_off_and_none_begins(make, load, tmp_path):
    env = make(LONG)
    env.reset()
    env.step(startable(env))
    memcached.stop(load)
    ended, give_up_s = False, time.monotonic() + 30.0
    while not ended:
        assert time.monotonic() < give_up_s
        _, _, _, ended, info = env.step(0)
    assert not info["episode_summary"]["completed"]
    assert not (tmp_path / "state" / "state.json").exists()
    with pytest.raises(InputError, match="no memcached of this machine"):
        env.reset()


@pytest.mark.survival
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_usual_checks_accept_it(make, load, tmp_path):
    env = make(LONG)
    gymnasium_check(env, skip_render_check=True)
    with pytest.raises(InputError, match="another loop is running"):
        make(LONG).reset()
    env.close()
    env = make(LONG)
    sb3_check(env)
    env.close()
    assert_restored(load, tmp_path)
    with pytest.raises(InputError, match="trace_seed"):
        env.reset(options={"trace_seed": 2333})


def test_a_memcached_without_load_is_refused(make, server, tmp_path):
    env = make()
    with pytest.raises(InputError, match=r"has no load \(\d+ requests/s\).* wants 1000 to 60000"):
        env.reset()
    assert_restored(server, tmp_path)


KILLED = """
import os, sys, gymnasium
env = gymnasium.make("env.registration:coretide/ColocationVM-v0", scenario=sys.argv[1],
    memcached=sys.argv[2], runtime="process", state=sys.argv[3], report=sys.argv[3] + "-log")
env.reset()
for words in ("service 0", "start dedup"):
    table = env.unwrapped.table
    env.step(next(e for e in range(len(table)) if table.describe(e).startswith(words)))
os.kill(os.getpid(), 9)
"""


def test_a_killed_trainer_is_made_safe_within_a_second_and_can_be_undone(
    load, scenario_file, tmp_path
):
    where, state = f"{load.host}:{load.port}", str(tmp_path / "state")
    scenario = str(scenario_file(dedup=LONG, radix=LONG))
    command = [sys.executable, "-c", KILLED, scenario, where, state]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == -9
    everywhere = tuple(sorted(os.sched_getaffinity(0)))
    give_up_s = time.monotonic() + 1.0
    while set(service_process.affinities(load.pid).values()) != {everywhere}:
        assert time.monotonic() < give_up_s, "memcached is still held"
        time.sleep(0.01)
    assert (tmp_path / "state" / "state.json").exists()
    restore = [sys.executable, str(ROOT / "deploy.py"), "--restore", "--state", state]
    assert subprocess.run(restore, cwd=ROOT, timeout=60).returncode == 0
    assert_restored(load, tmp_path)


# --- the trainer ---


@pytest.fixture
def checkpoint(scenario_file, tmp_path):
    """What training in the simulator leaves: a whole checkpoint, not yet any good."""
    scenario = load_scenario(scenario_file())
    recipe = load_recipe("live")
    environments = ColocationVecEnv(scenario, 2, 1.0)
    model = new_model(recipe, environments, 0)
    model.num_timesteps = 1000
    path = tmp_path / "simulated.zip"
    save_checkpoint(model, path, describe(model, scenario, environments.factory.profile, {}))
    return path


def trainer_options(tmp_path, where, scenario, *options):
    """Of `train.py --env vm`, for a memcached at an address."""
    recipe = load_recipe("live").model_dump(mode="json") | SMALL
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    return [
        *("--env", "vm", "--scenario", str(scenario), "--memcached", where, "--runtime", "process"),
        *("--recipe", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "run")),
        *("--state", str(tmp_path / "state"), *options),
    ]


def trainer(tmp_path, server, scenario, *options):
    """`train.py --env vm` as a process."""
    where = f"{server.host}:{server.port}"
    return subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "train.py")),
            *trainer_options(tmp_path, where, scenario, *options),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.survival
def test_a_checkpoint_goes_on_learning_on_this_machine(load, scenario_file, checkpoint, tmp_path):
    scenario = scenario_file(dedup=SHORT, radix=SHORT)
    before = read_checkpoint(checkpoint)
    process = trainer(tmp_path, load, scenario, "--resume", str(checkpoint))
    _, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    after = read_checkpoint(tmp_path / "run" / "last.zip")
    assert after.metadata["steps"] == 1024
    assert not np.array_equal(before.layers[0][0], after.layers[0][0])
    assert np.allclose(before.layers[0][0], after.layers[0][0], atol=0.01)
    assert after.metadata["evaluation"]["traces"] == "this machine's load, measured"
    assert (tmp_path / "run" / "episodes" / "0001" / "events.log").exists()
    assert_restored(load, tmp_path)


@pytest.mark.survival
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.survival), signal.SIGTERM]
)
def test_asked_to_stop_the_trainer_restores_everything(load, scenario_file, tmp_path, number):
    scenario = scenario_file(dedup=LONG, radix=LONG)
    process = trainer(tmp_path, load, scenario, "--steps", "100000")
    events = tmp_path / "run" / "episodes" / "0001" / "events.log"
    give_up_s = time.monotonic() + 60.0
    while not (events.exists() and " start dedup " in events.read_text()):
        assert time.monotonic() < give_up_s and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    said, complaints = process.communicate(timeout=30)
    assert process.returncode == 0, complaints
    assert "interrupted at" in said
    assert_restored(load, tmp_path)


@pytest.fixture
def sigterm():
    """A trainer in this process takes the signal for its own."""
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


def test_bad_input_is_one_line_and_exit_code_2(server, scenario_file, tmp_path, sigterm, capsys):
    here = f"{server.host}:{server.port}"
    for where, options, says in (
        ("127.0.0.1:9", [], "127.0.0.1:9: no memcached of this machine answers there"),
        (here, [], "memcached has no load"),
        (here, ["--fast"], "--fast: for the simulator only"),
        (here, ["--resume", "nowhere.zip"], "no such checkpoint"),
    ):
        with pytest.raises(SystemExit) as refused:
            train.main(trainer_options(tmp_path, where, scenario_file(), *options))
        complaints = capsys.readouterr().err
        assert refused.value.code == 2, complaints
        assert complaints.count("\n") == 1
        assert says in complaints
