"""
The programs of a Kubernetes control plane, built once from Go modules and kept by version.

    python -m tests.cluster.control_plane_build

prints the folder that they are in. A first build takes some 17 minutes of a vCPU.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

KUBERNETES, STAGING, ETCD, KWOK = "v1.37.2", "v0.37.2", "v3.7.3", "v0.8.0"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd", "kwok")

ETCD_MAIN = """package main

import (
\t"os"

\t"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
"""


def cache_folder() -> Path:
    """Where the programs of these versions are kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "coretide-control-plane" / f"{KUBERNETES}-etcd-{ETCD}-kwok-{KWOK}"


def go_command() -> str | None:
    """The Go compiler; None where there is none."""
    return shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")


def build(names: Sequence[str] = PROGRAMS) -> Path:
    """
    Build what is missing.

    :param names: the programs, Kubernetes' own in any number
    :return: the folder of the programs
    :raises RuntimeError: in one line, where there is no Go compiler or a build fails
    """
    go = go_command()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (folder / name).is_file():
            continue
        if go is None:
            raise RuntimeError(f"{name} cannot be built: no Go compiler (go) on this machine")
        if name == "etcd":
            _build(go, "go.etcd.io/etcd/server/v3", ETCD, ETCD_MAIN, folder)
        elif name == "kwok":
            _build(go, "sigs.k8s.io/kwok/cmd/kwok", KWOK, "", folder)
        else:
            _build(go, f"k8s.io/kubernetes/cmd/{name}", KUBERNETES, "", folder)
    return folder


def _build(go: str, package: str, version: str, main: str, folder: Path) -> None:
    """Build a package, by a module of our own that pins the package's."""
    path = package.partition("/cmd/")[0]
    with tempfile.TemporaryDirectory(prefix="coretide-build-") as work:
        lines = ["module control.plane/build", f"require {path} {version}"]
        if path == "k8s.io/kubernetes":
            # It takes its own parts from its source tree, as v0.0.0; they are published, too.
            own = _run(go, work, "mod", "download", "-json", f"{path}@{version}")
            found = re.search(r'"GoMod": "(.+)"', own)
            assert found
            parts = re.findall(r"^\s*(k8s\.io/\S+) v0\.0\.0$", Path(found[1]).read_text(), re.M)
            lines += [f"replace {part} => {part} {STAGING}" for part in dict.fromkeys(parts)]
        release = re.search(r"go(\d+\.\d+)", _run(go, work, "version"))
        assert release
        (Path(work) / "go.mod").write_text("\n".join([*lines, f"go {release[1]}.0", ""]))
        if main:
            (Path(work) / "main.go").write_text(main)
        flags = ("-mod=mod", "-trimpath", "-ldflags", "-s -w")
        name = "etcd" if main else package.rpartition("/")[2]
        target = "." if main else package
        _run(go, work, "build", *flags, "-o", str(Path(work) / name), target)
        shutil.move(Path(work) / name, folder / name)


def _run(go: str, folder: str, *arguments: str) -> str:
    done = subprocess.run(
        [go, *arguments],
        cwd=folder,
        env=os.environ | {"CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]
        raise RuntimeError(f"go {arguments[0]} failed: {said}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(build())
    except RuntimeError as error:
        print(f"coretide: {error}", file=sys.stderr)
        sys.exit(2)
