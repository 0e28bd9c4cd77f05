"""The folders of `deploy` depend on one another in one direction only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import deploy

FOLDER = Path(deploy.__file__).parent
MAY_USE = {
    "linux": set(),
    "records": {"linux"},
    "engines": {"linux", "records"},
    "load": {"linux", "records"},
    "jobs": {"linux", "records"},
    "safety": {"linux", "records", "jobs"},
    "loop": {"linux", "records", "jobs", "safety"},
}


def used_by(path: Path) -> set[str]:
    """What a file imports of `deploy`: names of folders, or of files at its top."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("deploy.")}


def test_every_folder_has_its_place() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/__init__.py")} == set(MAY_USE)


@pytest.mark.parametrize("folder", MAY_USE)
def test_a_folder_uses_only_those_below_it(folder: str) -> None:
    used = set().union(*map(used_by, (FOLDER / folder).glob("*.py")))
    assert used <= MAY_USE[folder] | {folder}
