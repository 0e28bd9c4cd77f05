"""
The house stays in order: small folders and files, one name for a thing, imports that go one way.

Read from the sources alone; nothing of what they import is run, but for `import env, agents`.
"""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES, MOST_LINES = 15, 600

#: The folders that a folder's modules may import, besides their own; docs/house.md draws them. A
#: package's top holds its commands and what its folders share, so the top and a folder in it may
#: import from each other, but no module imports in a circle. `benchmarks` may import anything.
MAY_IMPORT = {
    "env": {"env/family", "env/inputs", "env/simulator"},
    "env/inputs": {"env"},
    "env/family": {"env", "env/inputs", "env/physics"},
    "env/cluster": {"env", "env/inputs"},
    "env/sets": {"env", "env/family", "env/physics", "env/simulator"},
    "env/lists": {"env", "env/physics", "env/sets", "env/simulator"},
    "env/physics": {"env"},
    "env/simulator": {"env", "env/family", "env/inputs", "env/physics"},
    "agents": {"agents/ppo", "env", "env/inputs", "env/lists", "env/sets"},
    "agents/ppo": {"agents", "env", "env/lists", "env/sets"},
    "agents/rules": {"agents", "env"},
    "deploy": {
        *("deploy/engines", "deploy/jobs", "deploy/linux", "deploy/load", "deploy/loop"),
        *("deploy/cluster", "deploy/node", "deploy/queue", "deploy/records", "deploy/safety"),
        *("deploy/group", "deploy/tap", "agents", "env", "env/inputs"),
    },
    "deploy/cluster": {"deploy/linux", "deploy/records", "env", "env/cluster", "env/inputs"},
    "deploy/node": {
        *("deploy", "deploy/cluster", "deploy/jobs", "deploy/linux", "deploy/loop"),
        *("deploy/records", "deploy/safety", "agents", "env"),
    },
    "deploy/linux": {"env"},
    "deploy/records": {"deploy/linux", "env", "env/inputs"},
    "deploy/queue": {"deploy/linux", "deploy/records", "env", "env/inputs"},
    "deploy/engines": {"deploy/linux", "deploy/records", "env"},
    "deploy/group": {"deploy/engines", "deploy/linux", "env", "env/inputs"},
    "deploy/load": {"deploy/linux", "deploy/records", "env", "env/inputs", "env/simulator"},
    "deploy/tap": {"deploy/linux", "deploy/records", "env", "env/inputs"},
    "deploy/jobs": {"deploy/linux", "deploy/records", "env"},
    "deploy/safety": {"deploy/jobs", "deploy/linux", "deploy/records", "agents", "env"},
    "deploy/loop": {
        *("deploy/jobs", "deploy/linux", "deploy/queue", "deploy/records", "deploy/safety"),
        *("agents", "env"),
    },
    "training": {
        *("training/analysis", "training/calibration", "training/evaluation", "training/machine"),
        *("training/measuring", "training/placement", "training/refinement"),
        *("env", "env/inputs", "env/simulator"),
    },
    "training/analysis": {"training", "env", "env/inputs", "env/physics"},
    "training/calibration/logs": {"env", "env/inputs"},
    "training/calibration": {
        *("training", "training/analysis", "training/calibration/logs"),
        *("env", "env/inputs", "env/physics", "env/simulator"),
    },
    "training/evaluation": {
        *("training", "training/analysis", "training/calibration/logs", "deploy/records", "agents"),
        *("env", "env/family", "env/inputs", "env/physics", "env/simulator"),
    },
    "training/placement": {
        *("training", "training/analysis", "env", "env/cluster", "env/inputs"),
        *("env/physics", "env/simulator"),
    },
    "training/imitation": {
        *("training", "training/evaluation", "env", "env/physics", "env/simulator"),
    },
    "training/ppo": {
        *("training", "training/evaluation", "training/imitation"),
        *("deploy", "deploy/linux", "agents", "agents/ppo"),
        *("env", "env/inputs", "env/physics", "env/simulator"),
    },
    "training/refinement": {
        *("training", "training/calibration", "training/calibration/logs", "training/evaluation"),
        *("training/ppo", "deploy", "deploy/engines", "deploy/records", "agents"),
        *("env", "env/inputs", "env/physics", "env/simulator"),
    },
    "training/general": {
        *("training", "training/imitation", "training/ppo", "agents", "agents/ppo"),
        *("env", "env/family", "env/lists", "env/sets", "env/simulator"),
    },
    "training/study": {
        *("training", "training/analysis", "env", "env/inputs"),
        *("deploy/engines", "deploy/group", "deploy/linux", "deploy/load"),
    },
    "training/machine": {
        *("training", "training/analysis", "training/calibration", "training/calibration/logs"),
        *("training/measuring", "training/refinement", "deploy/linux"),
        *("env", "env/family", "env/inputs", "env/physics", "env/simulator"),
    },
    "training/measuring": {
        *("training", "training/analysis"),
        *("deploy/engines", "deploy/jobs", "deploy/linux", "deploy/load", "deploy/records"),
        *("env", "env/inputs", "env/simulator"),
    },
}

PACKAGES = ("env", "agents", "deploy", "training", "benchmarks")

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


MODULES = {module_name(path): path for path in sources(*PACKAGES)}


def folder_of(module: str) -> str:
    """The folder of a module of the packages; the name itself of any other."""
    return str(MODULES[module].parent.relative_to(ROOT)) if module in MODULES else module


def joined_to_its_top(one: str, other: str) -> bool:
    """Whether one folder is the package's top, and the other stands in it."""
    return one.startswith(f"{other}/") or other.startswith(f"{one}/")


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
    for path in sources(*PACKAGES, "tests"):
        counts[str(path.parent.relative_to(ROOT))] += 1
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_no_file_is_too_long() -> None:
    paths = [*ROOT.glob("*.py"), *sources(*PACKAGES, "tests")]
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in paths}
    assert not {path: count for path, count in lines.items() if count > MOST_LINES}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_subfolder_says_what_it_answers_and_imports_nothing(package: str) -> None:
    for folder in {path.parent for path in sources(package)} - {ROOT / package}:
        tree = parsed(folder / "__init__.py")
        assert ast.get_docstring(tree), folder
        assert len(tree.body) == 1, f"{folder}: more than a docstring"


# --- names ------------------------------------------------------------------------------------


def test_no_file_name_occurs_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in MODULES.values():
        if path.name not in ("__init__.py", "__main__.py"):  # Python names them
            places[path.name].append(str(path.parent.relative_to(ROOT)))
    assert not more_than_one(places)


def test_no_class_name_occurs_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert not more_than_one(places)


# --- docstrings -------------------------------------------------------------------------------

PUBLIC = re.compile("__init__$|[^_]")


def public_functions(body: list[ast.stmt]) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    """The functions and methods that others may call, each with its class."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and PUBLIC.match(node.name):
            yield node, None
        elif isinstance(node, ast.ClassDef) and PUBLIC.match(node.name):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and PUBLIC.match(method.name):
                    yield method, node


def is_inherited(method: str, owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a class of the repository that the owner is derived from has the method, too."""
    names = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in owner.bases}
    return any(
        method in {getattr(node, "name", None) for node in classes[name].body}
        or is_inherited(method, classes[name], classes)
        for name in names & classes.keys()
    )


def test_every_public_function_explains_its_parameters() -> None:
    """One that is overridden is explained where it is defined; "See `...`" says who explains it."""
    paths = [*ROOT.glob("*.py"), *MODULES.values()]
    nodes = [node for path in paths for node in ast.walk(parsed(path))]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    unexplained = []
    for path in paths:
        for function, owner in public_functions(parsed(path).body):
            if owner and is_inherited(function.name, owner, classes):
                continue
            text = ast.get_docstring(function) or ""
            if owner and function.name == "__init__":
                text = ast.get_docstring(owner) or ""
            children = ast.iter_child_nodes(function.args)
            given = {node.arg for node in children if isinstance(node, ast.arg)}
            missing = given - {"self", "cls"} - set(re.findall(r":param (\w+):", text))
            if missing and not text.startswith("See `"):
                unexplained.append(f"{path}:{function.lineno} {function.name}: {missing}")
    assert not unexplained


# --- pages ------------------------------------------------------------------------------------

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = re.compile(
    rf"(?<![\w/.-])(?:{'|'.join([*PACKAGES, 'tests', 'docs', 'checkpoints'])})/[\w./-]*\w"
)
COMMANDS = re.compile(rf"-m ((?:{'|'.join(PACKAGES)})(?:\.\w+)*)")
OPTIONS = re.compile(r"(?<![\w-])--[a-z][a-z-]+")

#: Options of other programs: tensorboard, mcperf, systemctl and pip.
OTHERS_OPTIONS = {"--logdir", "--noload", "--loadonly", "--now", "--require-hashes"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_commands_and_options_that_there_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not {name for name in FILES.findall(text) if not (ROOT / name).exists()}
    assert set(COMMANDS.findall(text)) <= MODULES.keys()
    code = "".join(path.read_text() for path in [*ROOT.glob("*.py"), *MODULES.values()])
    ours = set(re.findall(r'"(--[a-z][a-z-]+)"', code))
    assert set(OPTIONS.findall(text)) <= ours | OTHERS_OPTIONS


def test_the_table_of_folders_has_them_all() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8")
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in MODULES.values()}
    assert set(re.findall(r"^\| `([\w/]+/)` \|", table, re.MULTILINE)) == folders


# --- imports ----------------------------------------------------------------------------------


def test_no_import_goes_in_a_circle() -> None:
    sorter = TopologicalSorter({module: imported(module) for module in MODULES})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_every_folder_has_its_place() -> None:
    assert set(map(folder_of, MODULES)) == {*MAY_IMPORT, "benchmarks"}


def test_folders_go_one_way() -> None:
    order = {
        folder: {below for below in allowed if not joined_to_its_top(folder, below)}
        for folder, allowed in MAY_IMPORT.items()
    }
    try:
        TopologicalSorter(order).prepare()
    except CycleError as error:
        pytest.fail(" may import ".join(reversed(error.args[1])))


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    for module in MODULES:
        if folder_of(module) == folder:
            ours = {name for name in imported(module) if name in MODULES or name == "tests"}
            assert set(map(folder_of, ours)) <= MAY_IMPORT[folder] | {folder}, module


def test_the_live_side_needs_neither_a_trainer_nor_the_compiler() -> None:
    found = {(name, module) for name, module in reached_from("deploy") if name in HEAVY}
    assert not found


def test_who_imports_env_and_agents_waits_for_nothing_large() -> None:
    large = HEAVY | {"numpy.random"}  # numpy imports it when it is first named
    code = f"import sys, env, agents; print({large} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
