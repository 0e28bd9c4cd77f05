"""Runs of several seeds: the same as one by one, in processes and on a Ray cluster."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from agents.checkpoint import read_checkpoint
from training.recipe import RECIPE_FOLDER

ROOT = Path(__file__).resolve().parents[3]
RAY = Path(sys.executable).with_name("ray")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of seconds."""
    content = yaml.safe_load((RECIPE_FOLDER / "default.yaml").read_text())
    content |= {"n_envs": 16, "n_steps": 32, "batch_size": 256, "steps": 2000}
    content |= {"evaluate_every": 1000, "selection_episodes": 1}
    path = tmp_path_factory.mktemp("recipe") / "short.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def train(*options: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *map(str, options)]
    # With more threads torch adds up in another order.
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=180
    )


@pytest.fixture(scope="module")
def alone(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of seed 8 by itself."""
    folder = tmp_path_factory.mktemp("alone")
    done = train("--recipe", recipe, "--seed", "8", "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


def same_network(one: Path, other: Path) -> bool:
    layers = [read_checkpoint(folder / "last.zip").layers for folder in (one, other)]
    pairs = zip(*(itertools.chain(*some) for some in layers), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def test_seeds_side_by_side_are_the_runs_of_these_seeds(
    recipe: Path, alone: Path, tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "runs")
    done = train("--recipe", recipe, "--seed", "7", "--seeds", "2", "--workers", "2", *out)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [re.findall(r"runs/(\d)", line) for line in lines] == [["7"], ["8"]]
    assert same_network(tmp_path / "runs" / "8", alone)
    assert not same_network(tmp_path / "runs" / "7", alone)
    assert "training for" in (tmp_path / "runs" / "7" / "train.log").read_text()


def test_a_run_that_fails_does_not_end_the_others(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    (out / "7" / "last.zip").mkdir(parents=True)  # in the way of its checkpoint
    done = train("--recipe", recipe, "--seed", "7", "--seeds", "2", "--workers", "2", "--out", out)
    assert done.returncode != 0
    assert [line for line in done.stdout.splitlines() if "runs/8" in line]
    assert read_checkpoint(out / "8" / "last.zip").metadata["seed"] == 8


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A Ray cluster of this machine alone, on the loopback; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = f"/tmp/coretide-ray-{port}"  # its sockets' paths must be short
    command = [
        str(RAY), "start", "--head", "--block", "--node-ip-address", "127.0.0.1",
        "--port", str(port), "--num-cpus", "2", "--include-dashboard", "false",
        "--disable-usage-stats", "--temp-dir", folder,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as head:
        assert head.stdout is not None
        said = ""
        for line in head.stdout:
            said += line
            if "--block" in line:
                break
        else:
            pytest.fail(said)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.communicate(timeout=60)
            shutil.rmtree(folder)


NEEDS_RAY = pytest.mark.skipif(
    not RAY.exists(), reason="Ray is not installed (pip install coretide[ray])"
)


@NEEDS_RAY
def test_seeds_on_a_cluster_are_the_same_and_come_back(
    recipe: Path, alone: Path, tmp_path: Path, cluster: str
) -> None:
    out = ("--out", tmp_path / "runs")
    done = train(
        "--recipe", recipe, "--seed", "7", "--seeds", "2", "--workers", "ray", *out,
        RAY_ADDRESS=cluster,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "runs" / "8") in done.stdout
    assert same_network(tmp_path / "runs" / "8", alone)
    assert "training for" in (tmp_path / "runs" / "8" / "train.log").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seeds", "0"], "--seeds: must be a whole number"),
        (["--workers", "many"], "--workers: must be a whole number"),
        (["--seeds", "2", "--env", "vm"], "--seeds, --workers: for the simulator only"),
        (["--seeds", "2", "--recipe", "nowhere"], "no such file"),
        (["--seeds", "2", "--resume", "nowhere.zip"], "no such checkpoint"),
        pytest.param(["--workers", "ray"], "--workers ray: no cluster answers", marks=NEEDS_RAY),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: list[str], says: str, tmp_path: Path
) -> None:
    done = train("--out", tmp_path / "run", *options, RAY_ADDRESS="127.0.0.1:9")
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
