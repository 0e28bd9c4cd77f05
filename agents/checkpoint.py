"""
Reading a checkpoint without torch: arrays and JSON only, never unpickled.

A checkpoint is a Stable-Baselines3 `.zip` with two more entries: the policy network's weights as
plain arrays and a metadata file that says what they were trained for.
`training.ppo.checkpoint_writing` writes it.
"""

import io
import json
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from env.action import edit_table
from env.errors import InputError
from env.observation import VERSION, feature_count
from env.scenario import Scenario, profile_hash

FORMAT = 1
METADATA_ENTRY = "coretide/metadata.json"
WEIGHTS_ENTRY = "coretide/weights.npz"
MAX_METADATA_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 64 << 20

CHECKPOINT_FOLDER = Path(__file__).resolve().parents[1] / "checkpoints"


@dataclass(frozen=True)
class Checkpoint:
    """
    A trained policy.

    :param path: the file
    :param metadata: scenario, observation version, actions, profile, evaluation figures
    :param layers: (weight float32[out, in], bias float32[out]) of each layer, ReLU between them
    """

    path: Path
    metadata: dict[str, Any]
    layers: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]

    def require_scenario(self, scenario: Scenario) -> None:
        """
        Make sure that the network has this scenario's observations and actions.

        :param scenario: what it is to run
        :raises InputError: if it was made for others
        """
        table = edit_table(scenario)
        actions = [table.describe(edit) for edit in range(len(table))]
        if self.metadata["actions"] != actions:
            raise InputError(
                f"{self.path}: made for scenario {self.metadata['scenario']}, whose actions "
                f"differ from those of {scenario.name}"
            )
        if self.metadata["features"] != feature_count(scenario):
            raise InputError(
                f"{self.path}: made for {self.metadata['features']} features; scenario "
                f"{scenario.name} has {feature_count(scenario)}"
            )

    def warn(self, scenario: Scenario) -> None:
        """
        Warn on stderr, in one line, if the policy was trained for another scenario or profile.

        :param scenario: what it is to run
        :raises InputError: if it was made for other observations or actions
        """
        self.require_scenario(scenario)
        was = self.metadata["scenario"], self.metadata.get("profile", {}).get("hash", "")
        now = scenario.name, profile_hash(scenario.profile)
        if was != now:
            trained, given = (
                f"scenario {name}, profile {hash_[:12] or 'without a hash'}"
                for name, hash_ in (was, now)
            )
            print(f"coretide: {self.path}: trained for {trained}; this is {given}", file=sys.stderr)


def find_checkpoint(name: str | Path) -> Path:
    """
    The path of a checkpoint; a shipped one is found from any folder.

    :param name: a path, or the name of a file in `checkpoints/`
    """
    path = Path(name)
    if not path.exists() and path.parent in (Path(), Path(CHECKPOINT_FOLDER.name)):
        path = CHECKPOINT_FOLDER / path.name
    return path


def read_checkpoint(name: str | Path) -> Checkpoint:
    """
    Read a checkpoint.

    :param name: a path, or the name of a file in `checkpoints/`
    :raises InputError: one line that says whether it is missing, truncated, not ours, too large,
        or of another version
    """
    path = find_checkpoint(name)
    try:
        with zipfile.ZipFile(path) as archive:
            metadata = json.loads(_entry(archive, METADATA_ENTRY, MAX_METADATA_BYTES))
            arrays = np.load(
                io.BytesIO(_entry(archive, WEIGHTS_ENTRY, MAX_WEIGHTS_BYTES)), allow_pickle=False
            )
            layers = [
                (arrays[f"weight_{index}"], arrays[f"bias_{index}"])
                for index in range(len(arrays.files) // 2)
            ]
    except FileNotFoundError as error:
        known = ", ".join(sorted(path.name for path in CHECKPOINT_FOLDER.glob("*.zip")))
        raise InputError(
            f"{name}: no such checkpoint; give a .zip file or one of: {known}"
        ) from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a folder; a checkpoint is a .zip file") from error
    except KeyError as error:
        raise InputError(
            f"{path}: not a coretide checkpoint, or a truncated one (it lacks {error.args[0]})"
        ) from error
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path}: not a complete checkpoint file (truncated or damaged)"
        ) from error
    _check(path, metadata, layers)
    return Checkpoint(path, metadata, layers)


def _entry(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    if name not in archive.namelist():
        raise KeyError(name)
    size = archive.getinfo(name).file_size
    if size > limit:
        raise InputError(f"{archive.filename}: {name} has {size} bytes; allowed are {limit}")
    return archive.read(name)


def _check(path: Path, metadata: Any, layers: list[tuple[Any, Any]]) -> None:
    wanted = ("format", "observation_version", "scenario", "features", "actions", "job_work_s")
    if not isinstance(metadata, dict) or any(name not in metadata for name in wanted):
        raise InputError(f"{path}: not a coretide checkpoint (its metadata lacks fields)")
    if metadata["format"] != FORMAT:
        raise InputError(f"{path}: format {metadata['format']}; this version reads {FORMAT}")
    if metadata["observation_version"] != VERSION:
        raise InputError(
            f"{path}: made for observation version {metadata['observation_version']}; "
            f"this version has {VERSION}"
        )
    width = metadata["features"]
    for weight, bias in layers:
        if weight.ndim != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
            raise InputError(f"{path}: layers of shapes that do not fit together")
        width = weight.shape[0]
    if not layers or width != len(metadata["actions"]):
        raise InputError(f"{path}: its network does not end in one output per action")
