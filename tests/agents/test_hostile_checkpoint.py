"""A checkpoint may be anybody's file: what is not plain JSON and float32 arrays is refused."""

import io
import json
import random
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest

from agents.checkpoint import (
    CHECKPOINT_FOLDER,
    METADATA_ENTRY,
    TRAINING_ENTRY,
    WEIGHTS_ENTRY,
    read_checkpoint,
)
from env.errors import InputError
from train import main as train

SHIPPED = CHECKPOINT_FOLDER / "best.zip"


@pytest.fixture(scope="module")
def entries():
    """Our entries of a shipped checkpoint."""
    with zipfile.ZipFile(SHIPPED) as archive:
        return {name: archive.read(name) for name in (METADATA_ENTRY, WEIGHTS_ENTRY)}


def written(path, entries, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def with_metadata(**changes):
    return lambda old: {METADATA_ENTRY: json.dumps(json.loads(old[METADATA_ENTRY]) | changes)}


def with_first_layer(weight):
    """The first layer's weight is another array."""

    def change(old):
        arrays = dict(np.load(io.BytesIO(old[WEIGHTS_ENTRY])))
        file = io.BytesIO()
        np.savez(file, **arrays | {"weight_0": weight})
        return {WEIGHTS_ENTRY: file.getvalue()}

    return change


def with_array_header(description, content=b""):
    """One array whose header says what it likes."""

    def change(old):
        header = description.encode() + b"\n"
        array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("weight_0.npy", array)
        return {WEIGHTS_ENTRY: file.getvalue()}

    return change


def header(descr="'<f4'", shape="(128, 96)"):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


def compressed_zeros(old):
    """5 KB that would become 1.5 GB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weight_0.npy", bytes(5 << 20))
    return {WEIGHTS_ENTRY: file.getvalue()}


def named_twice(old):
    """One array that the archive's directory names again and again."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            archive.writestr(
                "weight_0.npy", zipfile.ZipFile(io.BytesIO(old[WEIGHTS_ENTRY])).read("weight_0.npy")
            )
    return {WEIGHTS_ENTRY: file.getvalue()}


HOSTILE = {
    "text": (with_first_layer(np.full((128, 96), "\x1b[31m")), "not of float32"),
    "complex": (with_first_layer(np.ones((128, 96), np.complex64)), "not of float32"),
    "pickle": (with_first_layer(np.array([{}], object)), "not of float32"),
    "double": (with_first_layer(np.ones((128, 96))), "not of float32"),
    "not finite": (with_first_layer(np.full((128, 96), np.nan, np.float32)), "not finite"),
    "other shape": (with_first_layer(np.ones((128, 95), np.float32)), "do not fit together"),
    "flat": (with_first_layer(np.ones(96, np.float32)), "do not fit together"),
    "huge shape": (with_array_header(header(shape="(400000000, 1)")), "not of float32"),
    "endless shape": (with_array_header(header(shape=f"({'9' * 5000},)")), "not of float32"),
    "deep header": (with_array_header("(" * 9000), "not of float32"),
    "code as header": (with_array_header("__import__('os').abort()"), "not of float32"),
    "bomb": (compressed_zeros, "compressed"),
    "named twice": (named_twice, "names an array twice"),
    "deep JSON": (lambda _: {METADATA_ENTRY: b"[" * 500_000}, "nested too deep"),
    "long JSON": (lambda _: {METADATA_ENTRY: b" " * (2 << 20)}, "2097152 bytes; allowed are"),
    "long number": (lambda _: {METADATA_ENTRY: b"9" * 10_000}, "truncated or damaged"),
    "a list": (lambda _: {METADATA_ENTRY: b"[]"}, "lacks fields"),
    "escape sequence": (with_metadata(scenario="\x1b]0;mine\x07\n"), "not a plain name"),
    "escaping hash": (with_metadata(profile={"hash": "\x1b[2J"}), "not a plain name"),
    "profile as text": (with_metadata(profile="\x1b[2J"), "not a plain name"),
    "format as text": (with_metadata(format="\x1b[2J"), "format must be a whole number"),
    "features as text": (with_metadata(features="96"), "features must be a whole number"),
    "actions as text": (with_metadata(actions="keep"), "actions must be a list"),
    "work as text": (with_metadata(job_work_s={"\x1b[2J": "1"}), "job_work_s are not seconds"),
    "endless work": (with_metadata(job_work_s={"radix": float("inf")}), "are not seconds"),
    "negative steps": (with_metadata(steps=-1), "steps are not a number of decisions"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_checkpoint_is_one_line_and_exit_code_2(case, entries, tmp_path, capsys):
    change, says = HOSTILE[case]
    path = written(tmp_path / "hostile.zip", entries | change(entries))
    tracemalloc.start()
    with pytest.raises(SystemExit) as ended:
        train(["--resume", str(path), "--out", str(tmp_path / "run")])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.endswith("\n") and said[:-1].isprintable()
    assert peak < 50e6


def test_compressed_entries_are_refused_whatever_they_hold(entries, tmp_path):
    path = written(tmp_path / "small.zip", entries, zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match=r"metadata\.json is compressed"):
        read_checkpoint(path)


def test_a_checkpoint_that_lacks_the_work_of_a_job_fits_no_scenario(entries, tmp_path, scenario):
    path = written(tmp_path / "idle.zip", entries | with_metadata(job_work_s={})(entries))
    with pytest.raises(InputError, match="lacks the work of jobs of cca-2025"):
        read_checkpoint(path).require_scenario(scenario)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: None, r"lacks coretide/training\.npz"),
        (lambda arrays: arrays | {"adam_mean": np.zeros(3, np.float32)}, "does not fit"),
        (lambda arrays: arrays | {"value_weight_0": np.zeros((1, 1), np.float32)}, "does not fit"),
        (lambda arrays: arrays | {"more": np.zeros(1, np.float32)}, "does not fit"),
        (lambda arrays: arrays | {"adam_square": arrays["adam_square"] - 1}, "no state of Adam"),
        (lambda arrays: arrays | {"adam_steps": np.array(-1, np.float32)}, "no state of Adam"),
    ],
)
def test_a_training_state_that_does_not_fit_is_refused(change, says, entries, tmp_path):
    arrays = change(read_checkpoint(SHIPPED).read_training_arrays())
    file = io.BytesIO()
    if arrays is not None:
        np.savez(file, **arrays)
        entries = entries | {TRAINING_ENTRY: file.getvalue()}
    path = written(tmp_path / "other.zip", entries)
    with pytest.raises(InputError, match=says) as caught:
        read_checkpoint(path).read_training_arrays()
    assert str(caught.value).isprintable()


def test_a_checkpoint_with_any_byte_changed_is_read_or_refused(entries, tmp_path):
    """Bytes of the zip's and the arrays' headers, where they matter most."""
    whole = written(tmp_path / "whole.zip", entries).read_bytes()
    damaged, rng = tmp_path / "damaged.zip", random.Random(0)
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            ends = (rng.randrange(400), len(content) - 1 - rng.randrange(1200))
            content[rng.choice(ends)] = rng.randrange(256)
        damaged.write_bytes(content)
        try:
            read_checkpoint(damaged)
        except InputError as error:
            assert str(error).isprintable()
