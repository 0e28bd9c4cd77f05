"""
What a deployment has left whose state is lost: found by the marks on all that it made.

Containers carry its nonce as a label and show the folder of their proof; processes name that folder
on their command line; control groups have the nonce in their names. What the state alone knew, the
vCPUs and the class that memcached had, stays unknown.
"""

import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from deploy.jobs.containers import LABEL, DockerRuntime, connect, docker_fault, sdk
from deploy.jobs.docker_socket import listens
from deploy.jobs.placement import session_members
from deploy.jobs.runtimes import ProcessRuntime, kill_all
from deploy.linux.cgroups import Hierarchy, find_groups
from deploy.records.proof import MOUNTED_AT, WRAPPER
from deploy.records.state import JobRecord, State, StateFolder
from deploy.safety.restore import undo

ATTEMPT = re.compile(r"attempt-([0-9a-f]{12})-")
"""Begins the name of an attempt's folder, see `StateFolder.attempt_folder`."""


@dataclass
class Leftovers:
    """
    What was found.

    :param containers: nonces of deployments that have containers
    :param processes: of those that have processes: the first of each job, by nonce
    :param groups: the groups of all of these, by nonce
    :param unknown: what could not be looked for, one line each
    """

    containers: set[str] = field(default_factory=set)
    processes: dict[str, list[int]] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def nonces(self) -> list[str]:
        """The deployments that left something."""
        return sorted(self.containers | set(self.processes) | set(self.groups))


def find(folder: StateFolder, hierarchy: Hierarchy | None, docker: str) -> Leftovers:
    """
    Look for what deployments of a state folder have left; those of another folder are not touched.

    :param folder: the state folder
    :param hierarchy: how control groups are mounted, if they are
    :param docker: address of the Docker daemon, empty where there is none
    """
    found = Leftovers(processes=_processes(folder.path))
    if docker and listens(docker):
        try:
            found.containers = _containers(folder.path, docker)
        except (OSError, sdk().errors.DockerException) as error:
            found.unknown.append(f"containers cannot be looked for: Docker: {docker_fault(error)}")
    began = {nonce for path in folder.attempt_folders() if (nonce := _nonce(path, folder.path))}
    for nonce in {*found.nonces, *began}:
        if hierarchy is not None and (groups := _groups(hierarchy, nonce)):
            found.groups[nonce] = groups
    return found


def end(
    found: Leftovers, folder: StateFolder, hierarchy: Hierarchy | None, docker: str
) -> list[str]:
    """
    End and remove what was found.

    :param found: what `find` has found
    :param folder: the state folder
    :param hierarchy: how control groups are mounted, if they are
    :param docker: address of the Docker daemon, empty where there is none
    :return: what could not be undone, one line each
    """
    faults = []
    for nonce in found.nonces:
        for pid in found.processes.get(nonce, []):
            if left := kill_all(partial(session_members, pid)):
                faults.append(f"processes that cannot be killed: {left}")
        state = State(nonce, "", "", docker, 0.0)
        groups = found.groups.get(nonce, [""])
        state.jobs = {f"job {i}": JobRecord(1, group=group) for i, group in enumerate(groups)}
        faults += undo(state, folder, ProcessRuntime(), hierarchy)
        if nonce in found.containers:
            if hierarchy is None:
                faults.append(f"containers of {nonce} are left: this user has no control groups")
                continue
            faults += undo(state, folder, DockerRuntime(hierarchy, nonce, docker), hierarchy)
    return faults


def _processes(folder: Path) -> dict[str, list[int]]:
    """Processes of this user that wait for a job and write its proof to the folder."""
    found: dict[str, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or entry.stat().st_uid != os.geteuid():
                continue
            arguments = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")
        except OSError:  # it has ended
            continue
        if WRAPPER in arguments:
            proofs = [Path(one).parent for one in arguments if one.endswith("/exit")]
            for nonce in {_nonce(proof, folder) for proof in proofs} - {""}:
                found.setdefault(nonce, []).append(int(entry.name))
    return found


def _containers(folder: Path, docker: str) -> set[str]:
    """Deployments that have containers whose proofs go to the folder."""
    found = set()
    client = connect(docker)
    try:
        for container in client.api.containers(all=True, filters={"label": LABEL}):
            for mount in container["Mounts"]:
                if mount["Destination"] == MOUNTED_AT:
                    nonce = _nonce(Path(mount["Source"]).parent, folder)
                    if nonce == container["Labels"][LABEL]:
                        found.add(nonce)
    finally:
        client.close()
    return found


def _groups(hierarchy: Hierarchy, nonce: str) -> list[str]:
    """The control groups of a deployment's jobs."""
    found = {
        str(PurePosixPath("/") / path.relative_to(mount))
        for mount in set(hierarchy.mounts.values())
        for path in find_groups(mount, f"coretide-{nonce}-")
    }
    return sorted(found)


def _nonce(attempt: Path, folder: Path) -> str:
    """The deployment of an attempt's folder; empty if it is none, or is elsewhere."""
    match = ATTEMPT.match(attempt.name)
    return match[1] if match is not None and attempt.parent == folder else ""
