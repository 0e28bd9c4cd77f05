"""Fuzzing: no reader falls over a small number of bad files, and one that does is noticed."""

import random
from pathlib import Path

import pytest

from benchmarks import fuzz
from env.errors import InputError

READERS = fuzz.readers()


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_reader_takes_a_file_or_refuses_it_in_one_line(reader: fuzz.FileReader) -> None:
    tally = fuzz.fuzz(reader, inputs=60, seed=1)
    assert (tally.inputs, tally.failures) == (60, 0), tally.first


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_what_is_changed_was_valid_before(reader: fuzz.FileReader, tmp_path: Path) -> None:
    for name, content in reader.beside.items():
        (tmp_path / name).write_bytes(content)
    for seed in reader.seeds:
        assert fuzz.fault_of(reader, tmp_path, seed, measured=False) == (True, "")


@pytest.mark.parametrize("error", [TypeError("x"), InputError(""), MemoryError()])
def test_a_reader_that_falls_over_is_noticed(error: Exception) -> None:
    def read(folder: Path) -> None:
        raise error

    tally = fuzz.fuzz(fuzz.FileReader("bad", "a.txt", [b"x"], read, {}), inputs=3, seed=0)
    assert tally.failures == 3 and tally.first


def test_the_same_seed_gives_the_same_files() -> None:
    for reader in READERS:
        first, again = (fuzz.mutated(reader, random.Random(7)) for _ in range(2))
        assert first == again
