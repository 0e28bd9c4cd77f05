"""What clients ask for: shares, sizes, keys, and the loop that they close themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from deploy.engines import memcached
from deploy.load.closed_loop import Clients
from deploy.load.dynamic_load import main
from deploy.load.generator import parser as generator_parser
from deploy.load.mix import DEFAULT, GET, SET, Mix, answers_in, mix_of

needs_memcached = pytest.mark.skipif(not shutil.which("memcached"), reason="no memcached")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_by_default_it_asks_as_mcperf_does(rng: np.random.Generator) -> None:
    requests = DEFAULT.draw(rng)
    assert {request.operation for request in requests} == {GET}
    assert {len(request.text) for request in requests} == {len(b"get \r\n") + 30}
    keys = Counter(request.text for request in requests)
    assert len(keys) > 5000 and max(keys.values()) < 10


def test_the_share_of_sets_and_the_sizes_of_values_are_as_asked(rng: np.random.Generator) -> None:
    requests = Mix(update=0.3, smallest=100, largest=300).draw(rng)
    sets = [request.text for request in requests if request.operation == SET]
    assert len(sets) / len(requests) == pytest.approx(0.3, abs=0.02)
    sizes = [int(text.split()[4]) for text in sets]
    assert min(sizes) >= 100 and max(sizes) <= 300
    assert np.mean(sizes) == pytest.approx(200.0, rel=0.03)
    assert all(len(text.split(b"\r\n")[1]) == int(text.split()[4]) for text in sets)


def test_keys_are_as_skewed_as_zipf_says(rng: np.random.Generator) -> None:
    keys = Mix(keys=100, zipf=1.0).draw_keys(rng, 100_000)
    counts = sorted(Counter(keys.tolist()).values(), reverse=True)
    harmonic = sum(1.0 / rank for rank in range(1, 101))
    for rank in (1, 2, 10):
        assert counts[rank - 1] / 1e5 == pytest.approx(1.0 / rank / harmonic, rel=0.1)
    # Whoever draws: the same keys are asked for often.
    other = Mix(keys=100, zipf=1.0).draw_keys(np.random.default_rng(8), 100_000)
    assert (
        Counter(other.tolist()).most_common(1)[0][0] == Counter(keys.tolist()).most_common(1)[0][0]
    )


def test_a_multi_get_asks_for_so_many_keys_at_once(rng: np.random.Generator) -> None:
    for request in Mix(multi_get=9).draw(rng, 100):
        assert len(request.text.split()) == 10


def test_large_requests_are_drawn_in_smaller_numbers(rng: np.random.Generator) -> None:
    requests = Mix(update=1.0, smallest=1 << 19, largest=1 << 19).draw(rng)
    assert 10 < len(requests) < 100


def test_answers_are_counted_wherever_they_are_cut() -> None:
    whole = b"VALUE k 0 3\r\n000\r\nEND\r\nSTORED\r\nSERVER_ERROR it is gone\r\nEND\r\nERROR\r\n"
    for cut in range(len(whole)):
        *first, end = answers_in(whole[:cut])
        *rest, _ = answers_in(whole[end:cut] + whole[cut:])
        assert [sum(both) for both in zip(first, rest, strict=True)] == [2, 1, 2]


def test_a_mix_survives_a_command_line() -> None:
    mix = Mix(0.25, 10, 99, 1234, 0.99, 3)
    line = ["--memcached", "h:1", "--cpu", "0", "--interval", "1", *mix.options(), "5"]
    assert mix_of(generator_parser().parse_args(line)) == mix


# --- a real memcached -------------------------------------------------------------------------


@needs_memcached
def test_clients_that_wait_obey_the_interactive_law() -> None:
    think_s, count = 0.004, 3
    with memcached.running(threads=1) as server:
        mix = Mix(update=0.5, keys=50)
        mix.load(server.host, server.port)
        clients = Clients(server.host, server.port, count, think_s, mix)
        first, second = clients.intervals([0.2, 0.6])
        clients.close()
    assert second.start_s == first.end_s
    latencies_s = second.latencies_s[GET] + second.latencies_s[SET]
    # N = X (R + Z): who asks is either served or thinking.
    response_s = float(np.mean(latencies_s))
    assert second.count / 0.6 * (response_s + think_s) == pytest.approx(count, rel=0.25)
    assert len(second.latencies_s[SET]) == pytest.approx(second.count / 2.0, rel=0.35)


@needs_memcached
@pytest.mark.parametrize("load", [("--clients", "2"), ("--scan", "2000:2000:1")])
def test_each_operation_has_rows_of_its_own(load: tuple[str, ...]) -> None:
    with memcached.running(threads=1) as server:
        where = f"{server.host}:{server.port}"
        mix = ("--update", "0.5", "--multi-get", "2", "--keys", "20", "--value-size", "1:2000")
        # A process of its own: it stays on its vCPU.
        command = [sys.executable, "-m", "deploy.load", "--memcached", where, *load, *mix]
        done = subprocess.run(
            [*command, "--duration", "0.3", "--interval", "0.3"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if row[0] in (GET, SET)] == [GET, SET]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--update", "1.5"), "--update: a share from 0 to 1, not 1.5"),
        (("--value-size", "9:3"), "--value-size: must be from 1 to 524288 bytes, rising"),
        (("--value-size", "many"), "--value-size: must be BYTES or FROM:TO"),
        (("--keys", "0"), "--keys: must be a whole number from 1"),
        (("--zipf", "-1"), "--zipf: must be a number of at least 0"),
        (("--multi-get", "5", "--keys", "4"), "--multi-get: 5 of 4 keys"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused_in_one_line(
    options: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--memcached", "127.0.0.1:1", "--clients", "2", *options])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and named in said


def test_only_a_closed_loop_thinks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--memcached", "127.0.0.1:1", "--scan", "1:5:1", "--think", "1"])
    assert stop.value.code == 2
    assert "--think: only clients of a closed loop think" in capsys.readouterr().err
