"""
A memcached with its proxy, built from Debian's source package where the system's own has none.

    python -m deploy.engines.proxy_build

prints the program. A first build takes some 40 seconds of a vCPU and no rights: it is kept by
version in the user's cache, headers that are missing are unpacked beside the source, and nothing
is installed.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from deploy.linux.own_folder import OwnFolder
from env.errors import InputError, exit_on_bad_input, os_reason

RELEASE = "trixie"
"""Debian 13, the first whose memcached (1.6.38) has the proxy."""

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
TOOLS = {"apt-get": "apt", "dpkg-source": "dpkg-dev", "gcc": "gcc", "make": "make"}
"""What a build needs, and the packages that have it."""

HOW = "make memcached-proxy builds one, and memcached 1.6.38 (Debian 13) has it built in"


def find_proxy() -> Path:
    """
    The memcached that can be a proxy: the system's, or the newest that was built.

    :raises InputError: if neither can: one line says how to get one
    """
    system = shutil.which("memcached")
    if system is not None and _has_proxy(system):
        return Path(system)
    made = [path for path in _cache().glob("*/memcached") if _is_own(path)]
    builds = sorted(made, key=lambda path: _numbers(path.parent.name))
    if not builds:
        raise InputError(f"memcached: this machine's has no proxy; {HOW}")
    return builds[-1]


def build() -> Path:
    """
    Build what is missing.

    :return: the program
    :raises InputError: in one line, where a tool or Debian's sources are missing or a step fails
    """
    try:
        return find_proxy()
    except InputError:
        pass
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise InputError(f"{tool}: not found; install it: apt-get install {package}")
    with tempfile.TemporaryDirectory(prefix="coretide-build-") as folder:
        work = Path(folder)
        source = _fetch_source(work)
        flags = [] if Path("/usr/include/event.h").exists() else _fetch_headers(work)
        _run(source, "./configure", "--quiet", "--enable-proxy", *flags)
        _run(source, "make", "--silent", f"-j{os.cpu_count()}")
        _run(source, "strip", "memcached")
        version = source.name.removeprefix("memcached-")
        kept = _cache() / version / "memcached"
        try:
            OwnFolder(kept.parent).close()
        except OSError as error:
            raise InputError(f"{kept.parent}: cannot keep a build: {os_reason(error)}") from error
        shutil.copy2(source / "memcached", kept.with_suffix(".new"))
        kept.with_suffix(".new").replace(kept)
    return kept


def _cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "coretide-memcached"


def _is_own(program: Path) -> bool:
    """Whether nobody else has had a hand in it: who starts it may be root."""
    with contextlib.suppress(OSError), OwnFolder(program.parent) as folder:
        return folder.own_file(program.name) is not None
    return False


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _has_proxy(program: str) -> bool:
    said = subprocess.run([program, "-h"], capture_output=True, text=True, check=False).stdout
    return "proxy_config" in said


def _fetch_source(work: Path) -> Path:
    """Unpack Debian's source package, from wherever this machine has its packages from."""
    targets = ("indextargets", "Label: Debian", "Component: main", "--format", "$(SITE)")
    sites = _run(work, "apt-get", *targets).split()
    if not sites or not KEYRING.exists():
        raise InputError(f"memcached: this machine has no packages of Debian to build from; {HOW}")
    sources = work / "sources.list"
    sources.write_text(
        f"deb-src [signed-by={KEYRING}] {sites[0]} {RELEASE} main\n", encoding="utf-8"
    )
    (work / "lists/partial").mkdir(parents=True)
    own = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work,
        "APT::Sandbox::User": "",  # root's files are for root alone
    }
    options = [f"-o{name}={value}" for name, value in own.items()]
    _run(work, "apt-get", *options, "-qq", "update")
    _run(work, "apt-get", *options, "-qq", "source", "memcached")
    return next(path for path in work.glob("memcached-*") if path.is_dir())


def _fetch_headers(work: Path) -> list[str]:
    """Unpack libevent's headers and static library; what tells configure where they are."""
    _run(work, "apt-get", "-oAPT::Sandbox::User=", "-qq", "download", "libevent-dev")
    package = next(work.glob("libevent-dev*.deb"))
    _run(work, "dpkg-deb", "-x", str(package), "libevent")
    root, machine = work / "libevent/usr", _run(work, "gcc", "-dumpmachine").strip()
    return [
        f"CPPFLAGS=-I{root}/include -I{root}/include/{machine}",
        f"LDFLAGS=-L{root}/lib/{machine}",
    ]


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise InputError(f"{command[0]} failed: {said}")
    return done.stdout


if __name__ == "__main__":
    with exit_on_bad_input():
        print(build())
