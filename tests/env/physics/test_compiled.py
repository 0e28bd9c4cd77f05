"""The kernel cache: compiled code never outlives the sources it was compiled from."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba.core.caching import IndexDataCacheFile

from env.physics.compiled import PROJECT, cache_folder, source_fingerprint

SOURCES = sorted(path.relative_to(PROJECT) for path in PROJECT.glob("env/**/*.py"))
KERNELS = [Path("training/imitation/expert.py"), Path("training/general/attention_kernels.py")]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources of `env` and `training`, to edit."""
    for name in ("env", "training"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECT / name, tmp_path / name, ignore=ignored)
    return tmp_path


def test_the_same_sources_have_the_same_fingerprint(copy: Path) -> None:
    assert source_fingerprint(copy) == source_fingerprint()
    (copy / "env" / "scenarios" / "another.yaml").write_text("name: another\n")
    assert source_fingerprint(copy) == source_fingerprint()  # data reaches kernels as arrays
    (copy / "training" / "more.py").write_text("")
    assert source_fingerprint(copy) == source_fingerprint()  # no kernel there


@pytest.mark.parametrize("source", [*SOURCES, *KERNELS], ids=str)
def test_an_edit_of_any_source_changes_the_fingerprint(copy: Path, source: Path) -> None:
    path = copy / source
    path.write_bytes(path.read_bytes() + b"#")
    assert source_fingerprint(copy) != source_fingerprint()


def test_a_new_a_lost_and_a_renamed_source_change_the_fingerprint(copy: Path) -> None:
    seen = {source_fingerprint(copy)}
    folder = copy / "env"
    (folder / "more.py").write_text("")
    seen.add(source_fingerprint(copy))
    (folder / "more.py").rename(folder / "less.py")
    seen.add(source_fingerprint(copy))
    (folder / "less.py").unlink()
    (folder / "reward.py").unlink()
    seen.add(source_fingerprint(copy))
    assert len(seen) == 4


def test_kernels_are_cached_under_the_fingerprint() -> None:
    assert cache_folder().name == source_fingerprint()
    assert Path(vars(numba.config)["CACHE_DIR"]) == cache_folder()


DRAW = """
import sys
from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory
from env.simulator.random import uniform

uniform(EpisodeFactory(load_scenario(sys.argv[1])).new_hosts(1)[0])
(kernel,) = uniform.overloads.values()
print(kernel.fndesc.mangled_name)
"""


def test_kernels_of_two_scenarios_share_no_symbol() -> None:
    """They would mix in the cache: who loads both ran one of them on the other's hosts."""

    def symbol(scenario: str) -> str:
        line = [sys.executable, "-c", DRAW, scenario]
        return subprocess.run(
            line, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=300
        ).stdout

    # Each by a process of its own, as numba numbers record types within one.
    assert symbol("local") == symbol("local") != symbol("cca-2025")


def test_processes_that_compile_at_once_lose_and_mix_no_kernel(tmp_path: Path) -> None:
    """Both would take one file name: the entry of one kernel then held the code of another."""
    kernels = [(process, number) for process in (1, 2) for number in range(100)]

    def compile_kernels(process: int) -> None:
        for kernel in kernels:
            if kernel[0] == process:
                IndexDataCacheFile(str(tmp_path), "kernels", "a stamp").save(kernel, kernel)

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=compile_kernels, args=(number,)) for number in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    cache = IndexDataCacheFile(str(tmp_path), "kernels", "a stamp")
    assert [cache.load(kernel) for kernel in kernels] == kernels


KERNEL = """
from env import rates
from env.physics.compiled import callable_from_kernel, compiled

callable_from_kernel(rates.rate)


@compiled
def pay(seconds):
    return rates.rate() * seconds


print(pay(2.0))
print(sum(pay.stats.cache_hits.values()))
"""


def test_an_edit_in_another_module_reaches_a_cached_kernel(tmp_path: Path) -> None:
    """The trap: numba's own cache does not look into functions inlined from elsewhere."""
    folder = tmp_path / "env"
    (folder / "physics").mkdir(parents=True)
    for package in (folder, folder / "physics"):
        (package / "__init__.py").write_text("")
    shutil.copy(PROJECT / "env" / "physics" / "compiled.py", folder / "physics")
    (folder / "physics" / "pay.py").write_text(KERNEL)

    def run(rate: float) -> list[str]:
        (folder / "rates.py").write_text(f"def rate():\n    return {rate}\n")
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        return subprocess.run(
            [sys.executable, "-m", "env.physics.pay"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.split()

    assert run(1.5) == ["3.0", "0"]
    assert run(1.5) == ["3.0", "1"]  # from the cache
    assert run(4.0) == ["8.0", "0"]
