"""
Reading a checkpoint without torch: arrays and JSON only, never unpickled.

A checkpoint is a Stable-Baselines3 `.zip` with three more entries: a metadata file that says what
the policy was trained for, the policy network's weights, and what else training needs to go on, the
last two as plain arrays. `training.ppo.checkpoint_writing` writes it.
"""

import contextlib
import math
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.array_archive import Arrays, read_arrays, read_json
from env.action import edit_table
from env.errors import InputError
from env.observation import VERSION, feature_count
from env.scenario import Scenario, profile_hash

Layer = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""Weight float32[out, in] and bias float32[out]."""

FORMAT = 1
METADATA_ENTRY = "coretide/metadata.json"
WEIGHTS_ENTRY = "coretide/weights.npz"
TRAINING_ENTRY = "coretide/training.npz"
MAX_METADATA_BYTES = 1 << 20
MAX_ARRAY_BYTES = 64 << 20
MAX_STEPS = 1 << 53

REQUIRED_FIELDS = {
    "format": int,
    "observation_version": int,
    "scenario": str,
    "features": int,
    "actions": list,
    "job_work_s": dict,
}
"""What metadata must say, and of which type."""

WORDS = {int: "a whole number", str: "text", list: "a list", dict: "a mapping"}
"""What messages call those."""

CHECKPOINT_FOLDER = Path(__file__).resolve().parents[1] / "checkpoints"
ANY_SCENARIO = "general.zip"
"""The shipped checkpoint of a network for any scenario (`agents.general_checkpoint`)."""


@dataclass(frozen=True)
class Checkpoint:
    """
    A trained policy.

    :param path: the file
    :param metadata: scenario, observation version, actions, profile, evaluation figures
    :param layers: of the policy network, ReLU between them
    """

    path: Path
    metadata: dict[str, Any]
    layers: list[Layer]

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the policy's hidden layers; those of the value network are the same."""
        return tuple(len(bias) for _, bias in self.layers[:-1])

    def fits(self, scenario: Scenario) -> bool:
        """
        Whether the network has this scenario's observations and actions.

        :param scenario: what it is to run
        """
        made_for = self.metadata["actions"], self.metadata["features"]
        return made_for == (_actions(scenario), feature_count(scenario))

    def is_specialist_of(self, scenario: Scenario) -> bool:
        """
        Whether the network was trained for this scenario on its profile, and still fits it.

        :param scenario: what it is to run
        """
        return self._trained_on == _identity(scenario) and self.fits(scenario)

    @property
    def _trained_on(self) -> tuple[str, str]:
        return self.metadata["scenario"], self.metadata.get("profile", {}).get("hash", "")

    def require_scenario(self, scenario: Scenario) -> None:
        """
        Make sure that the network has this scenario's observations and actions.

        :param scenario: what it is to run
        :raises InputError: if it was made for others
        """
        if not scenario.jobs:
            raise InputError(
                f"{self.path}: made for the jobs of {self.metadata['scenario']}; a queue takes "
                f"{ANY_SCENARIO}, or --policy first-come"
            )
        if self.metadata["actions"] != _actions(scenario):
            raise InputError(
                f"{self.path}: made for scenario {self.metadata['scenario']}, whose actions "
                f"differ from those of {scenario.name}; {_what_fits(scenario)}"
            )
        if self.metadata["features"] != feature_count(scenario):
            raise InputError(
                f"{self.path}: made for {self.metadata['features']} features; scenario "
                f"{scenario.name} has {feature_count(scenario)}; {_what_fits(scenario)}"
            )
        if set(self.metadata["job_work_s"]) != set(scenario.job_names):
            raise InputError(f"{self.path}: its metadata lacks the work of jobs of {scenario.name}")

    def warn(self, scenario: Scenario) -> None:
        """
        Warn on stderr, in one line, if the policy was trained for another scenario or profile.

        :param scenario: what it is to run
        :raises InputError: if it was made for other observations or actions
        """
        self.require_scenario(scenario)
        was, now = self._trained_on, _identity(scenario)
        if was != now:
            trained, given = (
                f"scenario {name}, profile {hash_[:12] or 'without a hash'}"
                for name, hash_ in (was, now)
            )
            print(f"coretide: {self.path}: trained for {trained}; this is {given}", file=sys.stderr)

    def read_training_arrays(self) -> Arrays:
        """
        What training needs to go on, besides the policy.

        :return: the value network's `value_weight_i` float32[out, in] and `value_bias_i`
            float32[out]; of Adam, `adam_mean` and `adam_square` float32[n], the moments of all
            weights and biases, those of the policy first, and `adam_steps` float32[]
        :raises InputError: if the file does not hold them, or in other shapes
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for index, (weight, bias) in enumerate(self.layers):
            n_outputs = len(bias) if index < len(self.layers) - 1 else 1
            shapes[f"value_weight_{index}"] = (n_outputs, weight.shape[1])
            shapes[f"value_bias_{index}"] = (n_outputs,)
        of_policy = sum(weight.size + bias.size for weight, bias in self.layers)
        moments = (of_policy + sum(math.prod(shape) for shape in shapes.values()),)
        shapes |= {"adam_mean": moments, "adam_square": moments, "adam_steps": ()}
        with opened(self.path) as archive:
            arrays = read_arrays(archive, TRAINING_ENTRY, MAX_ARRAY_BYTES)
        if {name: array.shape for name, array in arrays.items()} != shapes:
            raise InputError(f"{self.path}: {TRAINING_ENTRY} does not fit its policy network")
        if min(arrays["adam_square"].min(), arrays["adam_steps"]) < 0.0:
            raise InputError(f"{self.path}: {TRAINING_ENTRY} is no state of Adam")
        return arrays


def find_checkpoint(name: str | Path) -> Path:
    """
    The path of a checkpoint; a shipped one is found from any folder.

    :param name: a path, or the name of a file in `checkpoints/`
    """
    path = Path(name)
    if not path.exists() and path.parent in (Path(), Path(CHECKPOINT_FOLDER.name)):
        path = CHECKPOINT_FOLDER / path.name
    return path


def shipped_for(scenario: Scenario) -> str:
    """
    The shipped checkpoint to run a scenario with, where nobody names one.

    It is the one trained for the scenario on its profile, or else the one for any, which is said on
    stderr. A queue, whose scenario has no jobs, always has the one for any.

    :param scenario: what is to be run
    :return: its path from the repository's root
    """
    if not scenario.jobs:
        return f"{CHECKPOINT_FOLDER.name}/{ANY_SCENARIO}"
    for name in (f"{scenario.name}.zip", "best.zip"):
        with contextlib.suppress(InputError):
            if read_checkpoint(CHECKPOINT_FOLDER / name).is_specialist_of(scenario):
                return f"{CHECKPOINT_FOLDER.name}/{name}"
    print(
        f"coretide: no shipped policy was trained for scenario {scenario.name} with its "
        f"profile; {ANY_SCENARIO} is for any",
        file=sys.stderr,
    )
    return f"{CHECKPOINT_FOLDER.name}/{ANY_SCENARIO}"


def read_entries(name: str | Path) -> tuple[Path, Any, Arrays]:
    """
    Read the metadata and the network's arrays of a checkpoint, not yet checked.

    :param name: a path, or the name of a file in `checkpoints/`
    :return: the file, its metadata (any JSON), its arrays by name
    :raises InputError: one line that says whether it is missing, truncated, not ours or too large
    """
    path = find_checkpoint(name)
    with opened(path) as archive:
        metadata = read_json(archive, METADATA_ENTRY, MAX_METADATA_BYTES)
        return path, metadata, read_arrays(archive, WEIGHTS_ENTRY, MAX_ARRAY_BYTES)


def read_checkpoint(name: str | Path) -> Checkpoint:
    """
    Read a checkpoint.

    :param name: a path, or the name of a file in `checkpoints/`
    :raises InputError: one line that says whether it is missing, truncated, not ours, too large,
        or of another version
    """
    path, metadata, arrays = read_entries(name)
    _check_metadata(path, metadata)
    layers = [
        (arrays.get(f"weight_{index}"), arrays.get(f"bias_{index}"))
        for index in range((len(arrays) + 1) // 2)
    ]
    return Checkpoint(path, metadata, _fitting(path, metadata, layers))


def _identity(scenario: Scenario) -> tuple[str, str]:
    """Name and profile by which a checkpoint knows the scenario that it was trained on."""
    return scenario.name, profile_hash(scenario.profile)


def _actions(scenario: Scenario) -> list[str]:
    table = edit_table(scenario)
    return [table.describe(edit) for edit in range(len(table))]


def _what_fits(scenario: Scenario) -> str:
    """What to give in place of a checkpoint that was made for another scenario."""
    for path in sorted(CHECKPOINT_FOLDER.glob("*.zip")):
        with contextlib.suppress(InputError):
            shipped = read_checkpoint(path)
            if shipped.fits(scenario):
                return f"{path.name} fits (--checkpoint {path.name})"
    return f"{ANY_SCENARIO} is for any scenario (--checkpoint {ANY_SCENARIO})"


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """
    The zip file of a checkpoint; whatever is wrong with it becomes an `InputError`.

    :param path: of the file
    :raises InputError: one line that says whether it is missing, truncated or not ours
    """
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a file"
            raise InputError(f"{path}: is {kind}; a checkpoint is a .zip file")
        with zipfile.ZipFile(path) as archive:
            yield archive
    except InputError:
        raise
    except FileNotFoundError as error:
        known = ", ".join(sorted(path.name for path in CHECKPOINT_FOLDER.glob("*.zip")))
        raise InputError(
            f"{path}: no such checkpoint; give a .zip file or one of: {known}"
        ) from error
    except KeyError as error:
        entries = (METADATA_ENTRY, WEIGHTS_ENTRY, TRAINING_ENTRY)
        lacking = ", ".join(entry for entry in entries if entry in str(error)) or "an entry"
        raise InputError(
            f"{path}: not a coretide checkpoint, or a truncated one (it lacks {lacking})"
        ) from error
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, RuntimeError, struct.error) as error:
        raise InputError(
            f"{path}: not a complete checkpoint file (truncated or damaged)"
        ) from error


def _check_metadata(path: Path, metadata: Any) -> None:
    """Make sure that metadata is of this version and that each field is what it should be."""
    if not isinstance(metadata, dict) or not metadata.keys() >= REQUIRED_FIELDS.keys():
        raise InputError(f"{path}: not a coretide checkpoint (its metadata lacks fields)")
    for name, kind in REQUIRED_FIELDS.items():
        if type(metadata[name]) is not kind:
            raise InputError(f"{path}: its metadata's {name} must be {WORDS[kind]}")
    if metadata["format"] != FORMAT:
        raise InputError(f"{path}: format {metadata['format']}; this version reads {FORMAT}")
    if metadata["observation_version"] != VERSION:
        raise InputError(
            f"{path}: made for observation version {metadata['observation_version']}; "
            f"this version has {VERSION}"
        )
    profile = metadata.get("profile", {})
    texts = [metadata["scenario"], profile.get("hash", "") if isinstance(profile, dict) else None]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise InputError(f"{path}: its metadata's scenario or profile is not a plain name")
    work = metadata["job_work_s"].values()
    if not all(type(one) in (int, float) and 0.0 < one < math.inf for one in work):
        raise InputError(f"{path}: its metadata's job_work_s are not seconds")
    steps = metadata.setdefault("steps", 0)  # a network that was not trained here has none
    if type(steps) is not int or not 0 <= steps < MAX_STEPS:
        raise InputError(f"{path}: its metadata's steps are not a number of decisions")


def _fitting(path: Path, metadata: dict[str, Any], layers: list[tuple[Any, Any]]) -> list[Layer]:
    """The layers, if they lead from the features to the actions."""
    width = metadata["features"]
    for weight, bias in layers:
        shapes = [None if array is None else array.shape for array in (weight, bias)]
        n_outputs = 0 if bias is None else bias.size
        if shapes != [(n_outputs, width), (n_outputs,)]:
            raise InputError(f"{path}: layers of shapes that do not fit together")
        width = n_outputs
    if not layers or width != len(metadata["actions"]):
        raise InputError(f"{path}: its network does not end in one output per action")
    return layers
