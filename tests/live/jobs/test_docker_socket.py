"""Docker's daemon asked at its socket: a real one, nobody, and somebody else."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.engines.daemon import Daemon
from deploy.jobs.docker_socket import LONGEST_ANSWER, listens, ping
from deploy.linux import service_process


@contextlib.contextmanager
def somebody_who_says(answer: bytes, path: Path) -> Iterator[str]:
    """The address of a server that gives one caller an answer, whatever is asked."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def say() -> None:
            caller, _ = listener.accept()
            with caller, contextlib.suppress(OSError):  # a caller may have heard enough
                caller.recv(1024)
                caller.sendall(answer)

        speaker = threading.Thread(target=say)
        speaker.start()
        try:
            yield f"unix://{path}"
        finally:
            speaker.join(10.0)


def test_a_daemon_says_what_it_is(docker_daemon: Daemon) -> None:
    assert ping(docker_daemon.url).startswith("Docker/")
    assert listens(docker_daemon.url)


def test_where_nobody_listens_nothing_can_be_asked(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/d"
    with pytest.raises(OSError):
        ping(nowhere)
    assert not listens(nowhere)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"VERSION 1.6.18\r\n",
        b"HTTP/1.0 500 Internal Server Error\r\nServer: Docker/26.1.5 (linux)\r\n\r\nno",
        bytes(100 * LONGEST_ANSWER),
    ],
    ids=["nothing", "memcached", "trouble", "without an end"],
)
def test_who_does_not_answer_as_docker_does_is_none(answer: bytes, tmp_path: Path) -> None:
    with somebody_who_says(answer, tmp_path / "d") as address, pytest.raises(ValueError):
        ping(address)


def test_somebody_else_is_refused_before_anything_is_touched(
    deploy, server, scenario_file: Callable[..., Path], groups_file: Path, tmp_path: Path
) -> None:
    before = service_process.affinities(server.pid)
    options = ["--policy", str(groups_file), "--scenario", str(scenario_file())]
    with somebody_who_says(b"HTTP/1.0 404 Not Found\r\n\r\n", tmp_path / "d") as address:
        run = deploy(*options, "--docker", address)
        assert run.finish(20.0) == 2
    assert len(run.lines) == 1 and "cannot be reached" in run.lines[0]
    assert service_process.affinities(server.pid) == before
    assert not run.state.exists() and not run.report.exists()
