"""
The image of the local scenario's jobs: stress-ng, its libraries and busybox, no registry needed.

It is made from the machine's own files (`docker import`). `/proof` is an empty folder: the place
where the runtime mounts what proves that a job did its work.
"""

import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import docker
from docker.errors import DockerException, ImageNotFound

from deploy.engines import daemon
from env.errors import InputError

STRESS_IMAGE = "coretide/stress-ng:local"
PROOF_FOLDER = "proof"
SOURCES_LABEL = "coretide.sources"
PROGRAMS = {"stress-ng": "stress-ng", "busybox": "busybox-static"}
"""What goes in, and the packages of Debian and Ubuntu that have it."""


@contextlib.contextmanager
def docker_daemon() -> Iterator[str]:
    """
    The address of the machine's Docker daemon, or of one of our own; it has the jobs' image.

    :raises InputError: if there is none and none can be started
    """
    with contextlib.ExitStack() as stack:
        url = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        if not _answers(url):
            # A short path, for its sockets.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coretide-")))
            url = stack.enter_context(daemon.running(folder / "docker")).url
        client = docker.DockerClient(base_url=url)
        stack.callback(client.close)
        ensure_stress_image(client)
        yield url


def _answers(url: str) -> bool:
    try:
        client = docker.DockerClient(base_url=url, timeout=5)
        client.ping()
        client.close()
    except DockerException:
        return False
    return True


def ensure_stress_image(client: docker.DockerClient) -> str:
    """
    Make the image unless the daemon has it, made from the same files.

    :param client: the daemon
    :return: the image's name
    :raises InputError: if one of the programs is not installed
    """
    files = image_files()
    sources = _fingerprint(files)
    try:
        if client.images.get(STRESS_IMAGE).labels.get(SOURCES_LABEL) == sources:
            return STRESS_IMAGE
    except ImageNotFound:
        pass
    repository, tag = STRESS_IMAGE.split(":")
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        write_archive(files, Path(archive.name))
        client.api.import_image_from_file(
            archive.name,
            repository=repository,
            tag=tag,
            changes=["ENV PATH=/usr/bin:/bin", "WORKDIR /tmp", f"LABEL {SOURCES_LABEL}={sources}"],
        )
    return STRESS_IMAGE


def image_files(packages: Mapping[str, str] = PROGRAMS) -> dict[str, Path]:
    """
    The files of an image: their paths in it, and on this machine.

    :param packages: the programs that go in, and the packages that have them
    :raises InputError: if one of the programs is not installed
    """
    found = {name: shutil.which(name) for name in packages}
    for name, path in found.items():
        if path is None:
            raise InputError(f"{name}: not found; install it: apt-get install {packages[name]}")
    programs = {name: Path(str(path)).resolve() for name, path in found.items()}
    files = {f"usr/bin/{name}": path for name, path in programs.items()}
    for program in programs.values():
        files |= {str(library).lstrip("/"): library for library in _libraries(program)}
    return files


def write_archive(files: dict[str, Path], archive: Path) -> None:
    """
    Pack an image's file system; the same files give the same bytes.

    :param files: paths in the image, and on this machine
    :param archive: the tar file to write
    """
    with tarfile.open(archive, "w") as tar:
        for folder, mode in (("tmp", 0o1777), (PROOF_FOLDER, 0o755), ("proc", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        shell = tarfile.TarInfo("bin/sh")
        shell.type, shell.linkname = tarfile.SYMTYPE, "/usr/bin/busybox"
        tar.addfile(shell)
        for name, path in sorted(files.items()):
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))


def _libraries(program: Path) -> list[Path]:
    """The shared libraries of a program and their loader, as ldd lists them."""
    result = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    # A static program is no fault: ldd says so and lists nothing.
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", result.stdout)]


def _fingerprint(files: dict[str, Path]) -> str:
    stamps = [
        (name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in sorted(files.items())
    ]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
