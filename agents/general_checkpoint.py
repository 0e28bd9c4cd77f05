"""
Reading the checkpoint of a network for any scenario: arrays and JSON only, as `agents.checkpoint`.

It has the same entries. Its metadata says how the tokens are written and which lists there are
instead of naming features and actions, and its weights are those of an attention network, by the
names and in the shapes of `agents.ppo.attention_network.shapes`.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.array_archive import Arrays, read_json
from agents.checkpoint import (
    FORMAT,
    MAX_METADATA_BYTES,
    METADATA_ENTRY,
    find_checkpoint,
    read_entries,
)
from agents.ppo.attention_network import shapes
from env.errors import InputError
from env.lists import menu
from env.scenario import Scenario
from env.sets.tokens import VERSION, Layout


@dataclass(frozen=True)
class GeneralCheckpoint:
    """
    A trained network for any scenario.

    :param path: the file
    :param metadata: versions of tokens and menu, what it was trained on, evaluation figures
    :param arrays: of the network
    """

    path: Path
    metadata: dict[str, Any]
    arrays: Arrays

    def layout(self, scenario: Scenario) -> Layout:
        """
        Room for a scenario's tokens.

        :param scenario: what it is to run
        """
        return Layout(len(scenario.jobs), scenario.machine.vcpus)

    def warn(self, scenario: Scenario) -> None:
        """
        There is nothing to warn of: the network runs any scenario.

        :param scenario: what it is to run
        """


def is_general(name: str | Path) -> bool:
    """
    Whether a checkpoint is one for any scenario; False also for what is no checkpoint at all.

    :param name: a path, or the name of a file in `checkpoints/`
    """
    try:
        with zipfile.ZipFile(find_checkpoint(name)) as archive:
            metadata = read_json(archive, METADATA_ENTRY, MAX_METADATA_BYTES)
    except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, InputError):
        return False
    return isinstance(metadata, dict) and "tokens_version" in metadata


def read_general_checkpoint(name: str | Path) -> GeneralCheckpoint:
    """
    Read a checkpoint for any scenario.

    :param name: a path, or the name of a file in `checkpoints/`
    :raises InputError: one line that says whether it is missing, truncated, not ours, too large,
        or of another version
    """
    path, metadata, arrays = read_entries(name)
    if not isinstance(metadata, dict) or "tokens_version" not in metadata:
        raise InputError(f"{path}: not a checkpoint for any scenario")
    versions = (("format", FORMAT), ("tokens_version", VERSION), ("menu_version", menu.VERSION))
    for field, known in versions:
        if metadata.get(field) != known:
            raise InputError(f"{path}: {field} {metadata.get(field)!r}; this version reads {known}")
    try:
        fits = {key: array.shape for key, array in arrays.items()} == shapes(arrays)
    except (KeyError, ValueError):
        fits = False
    if not fits:
        raise InputError(f"{path}: its arrays are not those of an attention network")
    return GeneralCheckpoint(path, metadata, arrays)
