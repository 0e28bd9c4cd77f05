"""
Jobs as Docker containers: no network, read-only, no capabilities, only proof and gate mounted.

Docker is asked to create, start and remove. vCPUs, weight and pauses are written directly
(`deploy.jobs.placement`): a pause freezes the group above the container's, because Docker loses
track of containers whose own group somebody else froze.
"""

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.jobs import gate
from deploy.jobs.docker_socket import CALL_LIMIT_S
from deploy.jobs.placement import GroupPlacement
from deploy.jobs.runtimes import (
    LOG_BYTES,
    LOG_LINES,
    PIDS_LIMIT,
    Attempt,
    Instance,
    JobFailedError,
    RuntimeUnavailableError,
)
from deploy.jobs.spared import without
from deploy.linux import standing
from deploy.linux.cgroups import Hierarchy, JobGroup, cpuset_folder
from deploy.linux.service_process import pin, stat_fields
from deploy.linux.signals import held
from deploy.records import proof
from env.allocation import Weight
from env.errors import fault

if TYPE_CHECKING:
    import docker

LABEL = "coretide.nonce"

GUESSER = "charset_normalizer"
"""What `requests` guesses encodings with where it is there: 3 MiB."""

LARGEST_FILE_MIB = 64
"""What a container may write to is in memory and no larger, `/tmp` and Docker's `/dev/shm`; all but
its proof, which is on the machine's disk and must not fill it."""

SUPERVISOR = b"containerd-shim"
"""How the name of a container's parent begins: containerd starts one for each container."""

OOM_EVENTS = {
    1: "/sys/fs/cgroup/memory/memory.oom_control",
    2: "/sys/fs/cgroup/memory.events",
}
"""Where a container sees the kernel count its OOM kills."""


class DockerRuntime:
    """
    Jobs as containers.

    :param hierarchy: how control groups are mounted
    :param nonce: marks our containers
    :param url: the daemon; the environment's own if none is given
    :param privileged: give containers Docker's default rights and a writable file system
    :param apart: vCPUs of the processes that look after our containers; none leaves them alone
    """

    name, ends_whole = "docker", True

    def __init__(
        self,
        hierarchy: Hierarchy,
        nonce: str,
        url: str | None = None,
        privileged: bool = False,
        apart: Sequence[int] = (),
    ):
        self._hierarchy = hierarchy
        self._nonce = nonce
        self._url = url
        self._privileged = privileged
        self._apart = tuple(apart)
        self._client: docker.DockerClient | None = None

    def start(self, attempt: Attempt, cores: tuple[int, ...], weight: Weight) -> Instance:
        """See `Runtime.start`."""
        if attempt.group is None:
            raise JobFailedError("containers need control groups that can be written")
        attempt.group.set_weight(weight)
        with self._calls() as api:
            try:
                container = self._create(api, attempt, cores)
                api.start(container)
            except sdk().errors.ImageNotFound as error:
                raise JobFailedError(f"image {attempt.job.image} is not there") from error
            except sdk().errors.APIError as error:
                if error.is_server_error():
                    raise
                raise JobFailedError(f"cannot be started: {error.explanation}") from error
            return self._instance(attempt, api.inspect_container(container["Id"]))

    def move(self, instance: Instance, cores: tuple[int, ...]) -> None:
        """See `Runtime.move`."""
        with self._calls() as api:
            api.update_container(instance.key, cpuset_cpus=",".join(map(str, cores)))

    def outcome(self, instance: Instance) -> tuple[int, str]:
        """See `Runtime.outcome`."""
        code = proof.exit_code(instance.attempt.folder)
        if code == 0:
            return 0, _trimmed(instance)
        with self._calls() as api:
            try:
                if self._state(api, instance)["Status"] != "created":
                    api.wait(instance.key, timeout=CALL_LIMIT_S)
                state = self._state(api, instance)
                tail = api.logs(instance.key, tail=LOG_LINES)[-LOG_BYTES:]
            except sdk().errors.NotFound:
                return proof.NO_PROOF if code is None else code, "its container is gone"
        if code is None:
            # 0 without proof is what a daemon says that did not see the end.
            code = proof.OOM if state["OOMKilled"] else int(state["ExitCode"]) or proof.NO_PROOF
        return code, f"{_trimmed(instance)}\n{tail.decode(errors='replace')}".strip()

    def remove(self, instance: Instance) -> None:
        """See `Runtime.remove`."""
        with self._calls() as api, contextlib.suppress(sdk().errors.NotFound):
            api.remove_container(instance.key, force=True, v=True)
        proof.trim(instance.attempt.folder)

    def find(self, attempt: Attempt) -> Instance | None:
        """See `Runtime.find`."""
        with self._calls() as api:
            try:
                found = api.inspect_container(self._container_name(attempt))
            except sdk().errors.NotFound:
                if proof.exit_code(attempt.folder) is None:
                    return None
                # Its end was seen, and not written down.
                return Instance(attempt, self._container_name(attempt), 0, -1, None)
            if found["Config"]["Labels"].get(LABEL) != self._nonce:
                return None
            return self._instance(attempt, found)

    def sweep(self, folders: list[Path], groups: list[JobGroup]) -> None:
        """See `Runtime.sweep`: whatever carries our mark."""
        with self._calls() as api:
            ours = {"label": f"{LABEL}={self._nonce}"}
            for container in api.containers(all=True, filters=ours):
                with contextlib.suppress(sdk().errors.NotFound):
                    api.remove_container(container["Id"], force=True, v=True)
            if left := api.containers(all=True, filters=ours):
                raise RuntimeUnavailableError(f"Docker has not removed {len(left)} containers")

    def _create(self, api: Any, attempt: Attempt, cores: tuple[int, ...]) -> Any:
        job, group = attempt.job, attempt.group
        assert group is not None
        limits: dict[str, Any] = {
            "network_mode": "none",
            "cpuset_cpus": ",".join(map(str, cores)),
            "cgroup_parent": str(group.path),
            "mem_limit": f"{job.memory_mib}m",
            "memswap_limit": f"{job.memory_mib}m",
            "pids_limit": PIDS_LIMIT,
            "oom_score_adj": standing.KILLED_FIRST,
            "mounts": [
                sdk().types.Mount(
                    proof.MOUNTED_AT, str(proof.proof_file(attempt.folder)), type="bind"
                ),
                sdk().types.Mount(
                    gate.MOUNTED_AT,
                    str(gate.gate_file(attempt.folder)),
                    type="bind",
                    read_only=True,
                ),
            ],
            "log_config": sdk().types.LogConfig(
                type="json-file", config={"max-size": "1m", "max-file": "1"}
            ),
            "security_opt": ["no-new-privileges"],
        }
        place = {}
        if not self._privileged:
            largest = LARGEST_FILE_MIB << 20
            file_size = sdk().types.Ulimit(name="fsize", soft=largest, hard=largest)
            limits |= {"read_only": True, "cap_drop": ["ALL"], "ulimits": [file_size]}
            limits["tmpfs"] = {"/tmp": f"size={LARGEST_FILE_MIB}m"}
            place = {"working_dir": "/tmp"}
        events = OOM_EVENTS[self._hierarchy.version]
        command = attempt.wrapped(proof.MOUNTED_AT, events, gate.MOUNTED_AT)
        return api.create_container(
            job.image,
            entrypoint=command[:1],
            command=command[1:],
            name=self._container_name(attempt),
            labels={LABEL: self._nonce, "coretide.job": job.name},
            host_config=api.create_host_config(**limits),
            **place,
        )

    def _instance(self, attempt: Attempt, inspected: dict[str, Any]) -> Instance:
        assert attempt.group is not None
        container, pid = inspected["Id"], int(inspected["State"]["Pid"])
        if pid:
            self._keep_apart(pid)
            with contextlib.suppress(OSError):  # it may have ended already
                placement = GroupPlacement(attempt.group, cpuset_folder(self._hierarchy, pid))
                return Instance(attempt, container, pid, os.pidfd_open(pid), placement)
        return Instance(attempt, container, 0, -1, None)

    def _keep_apart(self, pid: int) -> None:
        """
        Keep who looks after a container, and all that it starts, off memcached's vCPUs.

        When the container ends it clears up at normal weight, for some 50 ms (docs/measured.md).
        Where it may not be moved it stays where it is.
        """
        if not self._apart:
            return
        with contextlib.suppress(OSError):
            supervisor = int(stat_fields(pid)[1])
            if Path(f"/proc/{supervisor}/comm").read_bytes().startswith(SUPERVISOR):
                pin(supervisor, self._apart)

    def _container_name(self, attempt: Attempt) -> str:
        return f"coretide-{self._nonce}-{attempt.job.name}-{attempt.number}"

    @staticmethod
    def _state(api: Any, instance: Instance) -> dict[str, Any]:
        state: dict[str, Any] = api.inspect_container(instance.key)["State"]
        return state

    @contextlib.contextmanager
    def _calls(self) -> Iterator[Any]:
        """Docker's API; a daemon that is away, slow or in trouble is not the job's fault."""
        try:
            if self._client is None:
                self._client = connect(self._url)
            yield self._client.api
        except (OSError, sdk().errors.DockerException) as error:  # the HTTP library's are OSErrors
            raise RuntimeUnavailableError(f"Docker: {docker_fault(error)}") from error


def _trimmed(instance: Instance) -> str:
    """Cut off what an attempt has written behind its proof; says so if it has."""
    cut = proof.trim(instance.attempt.folder)
    return f"{cut} bytes behind its proof are cut off" if cut else ""


@functools.cache
def sdk() -> Any:
    """
    Docker's SDK, imported by the first call, in the worker: it takes a quarter of the start.

    Its HTTP library does without what guesses a text's encoding, as Docker's texts are UTF-8, and
    without TLS, as Docker is at a socket of this machine, unless the process has OpenSSL already:
    then others may need TLS, too. A signal waits for the import: half a library has none of the
    errors that whoever is interrupted asks it for.
    """
    warnings.filterwarnings("ignore", "Unable to find acceptable character detection")
    spared = [GUESSER] if "_hashlib" in sys.modules else [GUESSER, "ssl"]
    with held(), without(*spared):
        import docker
    return docker


def docker_fault(error: BaseException) -> str:
    """
    What Docker's SDK has met, in words: the system's own where it comes from there.

    :param error: what it raised; it wraps the system's refusals several times
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return fault(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error)


def connect(url: str | None) -> "docker.DockerClient":
    """
    A Docker daemon.

    :param url: its address; the environment's own if none is given
    """
    if url is None:
        return sdk().from_env(timeout=CALL_LIMIT_S)
    return sdk().DockerClient(base_url=url, timeout=CALL_LIMIT_S)
