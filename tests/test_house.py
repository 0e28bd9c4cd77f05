"""
The house stays in order: small folders and files, one name for a thing, imports that go one way.

Read from the sources alone; nothing of what they import is run, but for `import env, agents`.
"""

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES, MOST_LINES = 15, 600

#: What each package may import of the others.
BELOW = {
    "env": set(),
    "agents": {"env"},
    "deploy": {"env", "agents"},
    "training": {"env", "agents", "deploy"},
    "benchmarks": {"env", "agents", "deploy", "training"},
}

#: What the live side does without: a trainer's libraries and the simulator's compiler.
HEAVY = {"torch", "stable_baselines3", "gymnasium", "numba"}


def sources(*folders: str) -> list[Path]:
    """The Python files below some folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sources(*BELOW)}


@functools.cache
def imported(module: str) -> frozenset[str]:
    """
    What a module imports anywhere in it, functions included.

    A module of the repository goes by its whole name, anything else by its package.
    """
    found: set[str] = set()
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return frozenset(name if name in MODULES else name.partition(".")[0] for name in found)


def reached_from(package: str) -> Iterator[tuple[str, str]]:
    """What is imported by a package, directly or not: the name, and a module that imports it."""
    waiting = [module for module in MODULES if module.partition(".")[0] == package]
    seen = set(waiting)
    while waiting:
        module = waiting.pop()
        for name in imported(module):
            yield name, module
            if name in MODULES and name not in seen:
                seen.add(name)
                waiting.append(name)


def more_than_one(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: where for name, where in places.items() if len(where) > 1}


# --- folders and files ------------------------------------------------------------------------


def test_no_folder_has_too_many_files() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in sources(*BELOW, "tests"):
        counts[str(path.parent.relative_to(ROOT))] += 1
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_no_file_is_too_long() -> None:
    paths = [*ROOT.glob("*.py"), *sources(*BELOW, "tests")]
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in paths}
    assert not {path: count for path, count in lines.items() if count > MOST_LINES}


@pytest.mark.parametrize("package", BELOW)
def test_a_subfolder_says_what_it_answers_and_imports_nothing(package: str) -> None:
    for folder in {path.parent for path in sources(package)} - {ROOT / package}:
        tree = parsed(folder / "__init__.py")
        assert ast.get_docstring(tree), folder
        assert len(tree.body) == 1, f"{folder}: more than a docstring"


# --- names ------------------------------------------------------------------------------------


def test_no_file_name_occurs_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in MODULES.values():
        if path.name != "__init__.py":
            places[path.name].append(str(path.parent.relative_to(ROOT)))
    assert not more_than_one(places)


def test_no_class_name_occurs_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert not more_than_one(places)


# --- imports ----------------------------------------------------------------------------------


def test_no_import_goes_in_a_circle() -> None:
    sorter = TopologicalSorter({module: imported(module) for module in MODULES})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", BELOW)
def test_imports_go_one_way(package: str) -> None:
    others = (set(BELOW) | {"tests"}) - BELOW[package] - {package}
    for module in MODULES:
        if module.partition(".")[0] == package:
            above = {name for name in imported(module) if name.partition(".")[0] in others}
            assert not above, module


def test_the_live_side_needs_neither_a_trainer_nor_the_compiler() -> None:
    found = {(name, module) for name, module in reached_from("deploy") if name in HEAVY}
    assert not found


def test_who_imports_env_and_agents_waits_for_nothing_large() -> None:
    code = f"import sys, env, agents; print({HEAVY} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
