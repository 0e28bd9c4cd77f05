"""The programs that coretide starts for itself: memcached, Docker's daemon, the jobs' image."""

from __future__ import annotations

import os
import select
import shutil
import socket
from pathlib import Path

import docker
import pytest

from deploy.engines import daemon, memcached
from deploy.engines.images import STRESS_IMAGE, ensure_stress_image, image_files, write_archive
from deploy.linux.cgroups import find_hierarchy, group_weight, members
from env.errors import InputError

needs_memcached = pytest.mark.skipif(not shutil.which("memcached"), reason="no memcached")
needs_stress = pytest.mark.skipif(
    not (shutil.which("stress-ng") and shutil.which("busybox")), reason="no stress-ng, no busybox"
)


@needs_memcached
def test_memcached_answers_as_soon_as_it_is_started() -> None:
    with memcached.running(threads=2) as server:
        assert memcached.answering_pid(server.host, server.port) == server.pid
        status = Path(f"/proc/{server.pid}/status").read_text()
        uid = status.split("Uid:")[1].split()[0]
        assert uid == ("65534" if os.geteuid() == 0 else str(os.geteuid()))
    with pytest.raises(OSError):
        memcached.answering_pid(server.host, server.port)


@needs_memcached
def test_memcached_listens_on_loopback_alone() -> None:
    with memcached.running(threads=1) as server:
        wanted = f"{server.port:04X}"
        listening = [
            line.split()[1]
            for table in ("/proc/net/tcp", "/proc/net/tcp6")
            for line in Path(table).read_text().splitlines()[1:]
            if line.split()[3] == "0A" and line.split()[1].endswith(f":{wanted}")
        ]
        assert listening == [f"0100007F:{wanted}"]


@needs_memcached
def test_a_port_that_is_taken_is_said() -> None:
    with memcached.running(threads=1) as first:
        with pytest.raises(InputError, match=str(first.port)):
            memcached.start(threads=1, port=first.port)
        assert memcached.answering_pid(first.host, first.port) == first.pid


def test_memcached_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="apt-get install memcached"):
        memcached.start(threads=1)


def test_somebody_who_is_not_memcached_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError):
        memcached.answering_pid(*server.getsockname(), limit_s=0.05)


def test_a_private_daemon_is_private(docker_daemon: daemon.Daemon) -> None:
    assert docker_daemon.folder.stat().st_mode & 0o777 == 0o700
    client = docker.DockerClient(base_url=docker_daemon.url)
    assert client.ping()
    assert client.info()["CgroupDriver"] == "cgroupfs"
    client.close()


@needs_stress
def test_a_job_runs_in_an_image_of_the_machines_own_files(docker_daemon: daemon.Daemon) -> None:
    client = docker.DockerClient(base_url=docker_daemon.url)
    assert ensure_stress_image(client) == STRESS_IMAGE
    first = client.images.get(STRESS_IMAGE).id
    ensure_stress_image(client)
    assert client.images.get(STRESS_IMAGE).id == first, "made again without need"
    said = client.containers.run(
        STRESS_IMAGE,
        ["/bin/sh", "-c", "stress-ng --cpu 1 --cpu-ops 5 --metrics-brief && ls -d /proof"],
        network_mode="none",
        read_only=True,
        cap_drop=["ALL"],
        tmpfs={"/tmp": ""},
        remove=True,
        stderr=True,
    )
    client.close()
    assert b"/proof" in said and b"successful run" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="dockerd needs root")
@pytest.mark.skipif(not shutil.which("dockerd"), reason="no dockerd")
def test_nothing_of_a_daemon_stays(tmp_path: Path) -> None:
    hierarchy = find_hierarchy()
    with daemon.running(tmp_path / "d") as engine:
        pid = engine.process.pid
        group = hierarchy.group_of(pid)
        assert group_weight(hierarchy, group) == daemon.WEIGHT[hierarchy.version], "it yields"
        assert any(b"containerd" in _command(other) for other in members(hierarchy, group))
    assert not hierarchy.folder(group).exists()
    assert not (tmp_path / "d").exists()
    assert not Path(f"/proc/{pid}").exists()
    left = [
        command
        for entry in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in (command := _read(entry))
    ]
    assert left == []


@needs_stress
@pytest.mark.skipif(os.geteuid() != 0, reason="dockerd needs root")
@pytest.mark.skipif(not shutil.which("dockerd"), reason="no dockerd")
def test_a_daemon_that_was_killed_leaves_no_container_either(tmp_path: Path) -> None:
    engine = daemon.start(tmp_path / "d")
    client = docker.DockerClient(base_url=engine.url)
    image = ensure_stress_image(client)
    container = client.containers.run(
        image, ["/bin/sh", "-c", "sleep 1000"], network_mode="none", detach=True
    )
    container.reload()
    first = container.attrs["State"]["Pid"]
    status = Path(f"/proc/{first}/status").read_text()
    holder = int(status.split("PPid:")[1].split()[0])
    ends = [os.pidfd_open(pid) for pid in (holder, first)]
    client.close()
    engine.process.kill()
    daemon.stop(engine)
    daemon.remove(engine.folder)
    for ended in ends:
        assert select.select([ended], [], [], 30.0)[0]
        os.close(ended)


def _command(pid: int) -> bytes:
    return _read(Path(f"/proc/{pid}/cmdline")).split(b"\0")[0]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(os.geteuid() != 0, reason="dockerd needs root")
def test_a_daemon_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(InputError, match="0700"):
        daemon.start(folder)
    with pytest.raises(InputError, match="too long"):
        daemon.start(tmp_path / ("long" * 30))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"apt-get install docker\.io"):
        daemon.start(tmp_path / "new")


@pytest.mark.skipif(os.geteuid() != 0, reason="dockerd needs root")
@pytest.mark.skipif(not shutil.which("dockerd"), reason="no dockerd")
def test_the_daemons_own_complaint_is_passed_on(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)
    (folder / "data").write_text("not a folder")
    with pytest.raises(InputError, match=r"^dockerd: could not start: .*dockerd\.log"):
        daemon.start(folder)


@needs_stress
def test_the_same_files_give_the_same_image(tmp_path: Path) -> None:
    files = image_files()
    assert {"usr/bin/stress-ng", "usr/bin/busybox"} < set(files)
    for name in ("a.tar", "b.tar"):
        write_archive(files, tmp_path / name)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
