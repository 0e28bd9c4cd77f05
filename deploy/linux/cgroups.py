"""
Control groups, version 1 and 2: where a job's CPU weight, vCPUs, quota and CPU time live.

Weight only acts between sibling groups. So every job gets a parent group of its own beside
memcached's, and whatever runs the job (Docker, or this program) puts it below. All writes are
plain file writes of 10-20 µs, and everything written can be read back.

A group in the background is idle (`cpu.idle`, Linux 5.15 and later): since Linux 6.6 a task of
however little weight finishes its slice of some 3 ms before memcached runs, unless it is idle.
Older kernels preempt by weight, and have the least one in its place.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from deploy.linux.service_process import kernel_text
from env.allocation import Weight
from env.errors import InputError, fault

MOUNTS = Path("/proc/self/mounts")

FREEZER, PIDS = "freezer", "pids"

NEEDED = ("cpu", "cpuacct", "cpuset", FREEZER)
"""Version 1's controllers that a job's group is made under, besides `PIDS` where there is one."""

FREEZER_FILE = {1: "freezer.state", 2: "cgroup.freeze"}
FROZEN = {1: {True: "FROZEN", False: "THAWED"}, 2: {True: "1", False: "0"}}
"""The file that holds all processes of a group, and what is written there."""

DEFAULT_WEIGHT = {1: 1024, 2: 100}
"""What a group weighs that nobody touched; tasks outside of groups weigh the same."""

LEAST_WEIGHT = {1: 2, 2: 1}
"""The kernel's minimum: a job's in the background where groups cannot be idle."""

DYING_SHARE = 10
"""What is to end has one part in so many of memcached's weight."""

IDLE_FILE = "cpu.idle"
"""The file that makes a group idle: it runs while nobody else wants to, and has no weight then."""

THREADS_FILE = {1: "tasks", 2: "cgroup.threads"}
EFFECTIVE_CPUS_FILE = {1: "cpuset.effective_cpus", 2: "cpuset.cpus.effective"}
"""Who is in a group, and the vCPUs that they really have."""

REALTIME_FILE = "cpu.rt_runtime_us"
"""Where kernels with RT_GROUP_SCHED limit a group's real-time threads; new groups have 0 there."""

QUOTA_PERIOD_US = 100_000

GONE = (errno.ENOENT, errno.ENODEV)
"""What the kernel says of a removed group's files, before and after they were opened."""


@dataclass(frozen=True)
class Hierarchy:
    """
    How control groups are mounted on this machine.

    :param version: 1 or 2
    :param mounts: for version 1 each controller's mount point; for version 2 the one mount
        point under the name of each controller that it has
    """

    version: int
    mounts: dict[str, Path]

    def group_of(self, pid: int | str, controller: str = "cpu") -> PurePosixPath:
        """
        The group a process is in.

        :param pid: the process, or "self"
        :param controller: name of the controller, which may have a hierarchy of its own
        :raises OSError: if there is no such process
        """
        text = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
        unified = PurePosixPath("/")
        for line in text.splitlines():
            number, controllers, path = line.split(":", 2)
            if self.version == 1 and controller in controllers.split(","):
                return PurePosixPath(path)
            if number == "0":
                unified = PurePosixPath(path)
        return unified

    def folder(self, group: PurePosixPath, controller: str = "cpu") -> Path:
        """
        The folder of a group's files of a controller.

        :param group: path of the group
        :param controller: name of the controller
        """
        return self.mounts[controller] / str(group).lstrip("/")

    def folders(self, group: PurePosixPath) -> list[Path]:
        """
        The folders of a group's files, one per mount.

        :param group: path of the group
        """
        return [mount / str(group).lstrip("/") for mount in sorted(set(self.mounts.values()))]


def find_hierarchy() -> Hierarchy:
    """
    Look at what is mounted.

    :raises OSError: if no cpu controller is mounted at all
    """
    first: dict[str, Path] = {}
    unified: Path | None = None
    for line in MOUNTS.read_text(encoding="utf-8").splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup2":
            unified = Path(folder)
        elif kind == "cgroup":
            for controller in options.split(","):
                first.setdefault(controller, Path(folder))
    known = {"cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids"}
    known |= {"hugetlb", "net_cls", "net_prio", "perf_event", "rdma", "misc", "name=systemd"}
    if {"cpu", FREEZER} <= first.keys():
        mounts_of = {name: path for name, path in first.items() if name in known}
        if unified is not None:  # has no controllers here, but Docker makes groups in it
            mounts_of["unified"] = unified
        return Hierarchy(1, mounts_of)
    if unified is not None:
        available = (unified / "cgroup.controllers").read_text(encoding="utf-8").split()
        if "cpu" in available:
            return Hierarchy(2, dict.fromkeys(available, unified))
    raise OSError("no cgroup hierarchy with the controllers cpu and freezer is mounted")


@dataclass
class JobGroup:
    """
    The parent group of one job.

    :param hierarchy: how groups are mounted
    :param path: the group's path
    :param normal_weight: memcached's weight, in the kernel's terms
    """

    hierarchy: Hierarchy
    path: PurePosixPath
    normal_weight: int
    _usage: int = field(default=-1, repr=False)

    def create(self) -> None:
        """
        Make the group; one that exists is taken over.

        :raises OSError: if the machine does not allow it
        """
        if self.hierarchy.version == 1:
            # memcached may be in a group of that name under some controllers only.
            counts = self.hierarchy.mounts.get(PIDS, Path("/nowhere")) / str(self.path.parent)[1:]
            for controller in (*NEEDED, *((PIDS,) if counts.exists() else ())):
                # memcached's group has none here where nobody freezes it; Docker makes it, too.
                parents = controller == FREEZER
                self.hierarchy.folder(self.path, controller).mkdir(parents=parents, exist_ok=True)
            # A version 1 cpuset starts empty, and holds no process while it is.
            folder = self.hierarchy.folder(self.path, "cpuset")
            for name in ("cpuset.cpus", "cpuset.mems"):
                inherited = (folder.parent / name).read_text(encoding="utf-8")
                (folder / name).write_text(inherited, encoding="utf-8")
        else:
            folder = self.hierarchy.folder(self.path)
            _delegate(folder.parent)
            folder.mkdir(exist_ok=True)

    @property
    def weight_file(self) -> Path:
        """Where the group's weight is written."""
        return weight_file(self.hierarchy, self.path)

    @property
    def freezer_file(self) -> Path:
        """Where the group is frozen and thawed."""
        version = self.hierarchy.version
        controller = FREEZER if version == 1 else "cpu"
        return self.hierarchy.folder(self.path, controller) / FREEZER_FILE[version]

    def set_frozen(self, frozen: bool) -> None:
        """
        Stop all processes in and below the group, or let them go on.

        It is the parent's file, never a container's own, which only Docker may write.

        :param frozen: whether to stop them
        :raises OSError: if the group is gone
        """
        _write(self.freezer_file, FROZEN[self.hierarchy.version][frozen])

    def release(self) -> None:
        """
        Have everything in the group run, so that it can be ended.

        Nobody dies while frozen by version 1, nor while idle on vCPUs that others never leave, and
        at the least weight beside a busy job that took a container 20 s. At memcached's own weight
        hundreds of dying processes would hold the loop up.

        :raises OSError: if the group is gone
        """
        if self._idle_file.exists():
            least = LEAST_WEIGHT[self.hierarchy.version]
            _write(self._idle_file, "0")
            _write(self.weight_file, str(max(least, self.normal_weight // DYING_SHARE)))
        self.set_frozen(False)

    def frozen(self) -> bool:
        """
        Whether the group's processes are stopped, or about to be, read back.

        :raises OSError: if the group is gone
        """
        return self.freezer_file.read_text(encoding="utf-8").strip() not in ("THAWED", "0")

    @property
    def background(self) -> str:
        """The file that puts the group into the background on this kernel."""
        return IDLE_FILE if self._idle_file.exists() else self.weight_file.name

    def set_weight(self, weight: Weight) -> None:
        """
        Give the group memcached's weight, or put it into the background.

        :param weight: normal or background
        :raises OSError: if the group is gone, or the kernel refuses; what was to get memcached's
            weight is in the background then
        """
        if not self._idle_file.exists():
            least = LEAST_WEIGHT[self.hierarchy.version]
            _write(self.weight_file, str(self.normal_weight if weight == Weight.NORMAL else least))
        elif weight == Weight.BACKGROUND:
            _write(self._idle_file, "1")
        else:
            try:
                _write(self._idle_file, "0")  # an idle group refuses a weight
                _write(self.weight_file, str(self.normal_weight))
            except OSError:
                # The kernel's default weight, which it has now, may be more than memcached's.
                with contextlib.suppress(OSError):
                    _write(self._idle_file, "1")
                raise

    def weight(self) -> Weight:
        """
        The weight in force, read back: whatever is not memcached's counts as the background.

        :raises OSError: if the group is gone
        """
        normal = group_weight(self.hierarchy, self.path) == self.normal_weight
        normal &= not is_idle(self.hierarchy, self.path)
        return Weight.NORMAL if normal else Weight.BACKGROUND

    @property
    def _idle_file(self) -> Path:
        return self.hierarchy.folder(self.path) / IDLE_FILE

    def join(self, pid: int) -> None:
        """
        Put a process into the group, under every controller that the group has.

        :param pid: all of its threads come along, and what it starts from then on
        :raises OSError: if it is gone, or the machine does not allow it
        """
        for folder in self.hierarchy.folders(self.path):
            if folder.exists():
                _write(folder / "cgroup.procs", str(pid))

    def set_quota(self, vcpus: float | None) -> None:
        """
        Limit the group's CPU time.

        :param vcpus: CPU seconds per second, or None for no limit
        """
        quota_us = None if vcpus is None else max(1000, round(vcpus * QUOTA_PERIOD_US))
        folder = self.hierarchy.folder(self.path)
        if self.hierarchy.version == 1:
            _write(folder / "cpu.cfs_period_us", str(QUOTA_PERIOD_US))
            _write(folder / "cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us))
        else:
            limit = "max" if quota_us is None else str(quota_us)
            _write(folder / "cpu.max", f"{limit} {QUOTA_PERIOD_US}")

    def allow_realtime(self) -> None:
        """
        Let threads in the group be real-time for as long as those in its parent may.

        :raises OSError: if the parent has given that to others
        """
        file = self.hierarchy.folder(self.path) / REALTIME_FILE
        if file.exists():
            _write(file, (file.parents[1] / REALTIME_FILE).read_text(encoding="utf-8"))

    def limit_processes(self, most: int) -> None:
        """
        Limit how many processes and threads the group may have, where the kernel counts them.

        :param most: none of those that are there is ended
        :raises OSError: if the group is gone
        """
        if PIDS in self.hierarchy.mounts:
            limit = self.hierarchy.folder(self.path, PIDS) / "pids.max"
            if limit.exists():
                _write(limit, str(most))

    def cpu_s(self) -> float:
        """
        CPU seconds that everything below the group has used since it was made.

        :raises OSError: if the group is gone
        """
        if self._usage < 0:
            name = "cpu.stat"
            folder = self.hierarchy.folder(self.path)
            if self.hierarchy.version == 1:
                name, folder = "cpuacct.usage", self.hierarchy.folder(self.path, "cpuacct")
            self._usage = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        text = os.pread(self._usage, 64, 0)
        if self.hierarchy.version == 1:
            return int(text) * 1e-9
        return int(text.split(None, 2)[1]) * 1e-6  # "usage_usec N" comes first

    def exists(self) -> bool:
        """Whether the group is there, under any controller."""
        return any(folder.exists() for folder in self.hierarchy.folders(self.path))

    def remove(self) -> None:
        """Remove the group under every controller, with the empty groups below it."""
        self.close()
        for folder in self.hierarchy.folders(self.path):
            remove_group(folder)

    def close(self) -> None:
        """Give the kept file descriptor back."""
        if self._usage >= 0:
            os.close(self._usage)
            self._usage = -1


def job_groups_beside(
    hierarchy: Hierarchy, service_pid: int | str, found: Mapping[str, int] | None = None
) -> Callable[[str], JobGroup]:
    """
    A maker of jobs' groups: beside memcached's, with memcached's weight for the normal one.

    :param hierarchy: how groups are mounted
    :param service_pid: a process of memcached's, or "self"
    :param found: what groups weighed before a deployment lifted them, by weight file
    :return: takes a group's name
    :raises OSError: if there is no such process
    :raises InputError: if memcached itself is in the background
    """
    service = hierarchy.group_of(service_pid)
    if is_idle(hierarchy, service):
        raise InputError(f"memcached's control group {service} is idle: write 0 to its {IDLE_FILE}")
    # Tasks of the root group compete with the groups below it, each task like a group.
    weight = DEFAULT_WEIGHT[hierarchy.version]
    if service != PurePosixPath("/"):
        file = str(weight_file(hierarchy, service))
        weight = (found or {}).get(file) or group_weight(hierarchy, service)
    return lambda name: JobGroup(hierarchy, service.parent / name, weight)


def group_weight(hierarchy: Hierarchy, group: PurePosixPath) -> int:
    """
    The weight of a group, in the kernel's terms.

    :param hierarchy: how groups are mounted
    :param group: path of the group
    """
    return int(weight_file(hierarchy, group).read_text(encoding="utf-8"))


def is_idle(hierarchy: Hierarchy, group: PurePosixPath) -> bool:
    """
    Whether a group runs only while nobody else wants to.

    :param hierarchy: how groups are mounted
    :param group: path of the group
    """
    with contextlib.suppress(FileNotFoundError):  # older kernels, and version 2's root group
        return (hierarchy.folder(group) / IDLE_FILE).read_text(encoding="utf-8").strip() == "1"
    return False


def weight_file(hierarchy: Hierarchy, group: PurePosixPath) -> Path:
    """
    The file of a group's weight.

    :param hierarchy: how groups are mounted
    :param group: path of the group
    """
    name = "cpu.shares" if hierarchy.version == 1 else "cpu.weight"
    return hierarchy.folder(group) / name


def cpuset_folder(hierarchy: Hierarchy, pid: int) -> Path:
    """
    The folder of the group that holds a process' vCPU set.

    :param hierarchy: how groups are mounted
    :param pid: the process
    """
    return hierarchy.folder(hierarchy.group_of(pid, "cpuset"), "cpuset")


def write_cpuset(folder: Path, cores: Iterable[int]) -> None:
    """
    Set the vCPUs of a group.

    :param folder: the group's folder, see `cpuset_folder`
    :param cores: at least one
    """
    _write(folder / "cpuset.cpus", ",".join(map(str, cores)))


def read_cpuset(folder: Path) -> tuple[int, ...]:
    """
    The vCPUs of a group, in rising order.

    :param folder: the group's folder, see `cpuset_folder`
    """
    return parse_cpus((folder / "cpuset.cpus").read_text(encoding="utf-8"))


def effective_cpuset(folder: Path, version: int) -> tuple[int, ...]:
    """
    The vCPUs that a group and all above it allow, in rising order.

    :param folder: the group's folder, see `cpuset_folder`
    :param version: of the hierarchy
    """
    return parse_cpus(kernel_text(f"{folder}/{EFFECTIVE_CPUS_FILE[version]}"))


def threads_in(folder: Path, version: int) -> list[int]:
    """
    The threads in a group itself, but for those of other pid namespaces.

    :param folder: the group's folder
    :param version: of the hierarchy
    """
    numbers = map(int, kernel_text(f"{folder}/{THREADS_FILE[version]}").split())
    return [number for number in numbers if number != 0]


def parse_cpus(text: str) -> tuple[int, ...]:
    """
    The vCPU numbers of a list of the kernel's.

    :param text: such as `0-2,5`
    """
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def put_back(files: Mapping[str, str]) -> list[str]:
    """
    Have files of control groups hold again what they held, and read that back.

    :param files: what they held, by path, in the order of writing; what is gone is left out
    :return: what could not be put back, one line each
    """
    faults = []
    for path, text in files.items():
        try:
            _write(Path(path), text)
            now = Path(path).read_text(encoding="utf-8")
            if now != text:
                faults.append(f"{path} holds {now.strip()}, not {text.strip()}")
        except OSError as error:
            if error.errno not in GONE:
                faults.append(f"{path} does not hold {text.strip()} again: {fault(error)}")
    return faults


def members(hierarchy: Hierarchy, group: PurePosixPath) -> list[int]:
    """
    The processes in a group and below it.

    :param hierarchy: how groups are mounted
    :param group: path of the group
    """
    pids: list[int] = []
    for folder, _, files in os.walk(hierarchy.folder(group)):
        with contextlib.suppress(OSError):  # a group may go away meanwhile
            if "cgroup.procs" in files:
                text = Path(folder, "cgroup.procs").read_text(encoding="utf-8")
                pids.extend(map(int, text.split()))
    return pids


def find_groups(mount: Path, beginning: str) -> list[Path]:
    """
    The folders of all groups whose name begins so; groups that go away meanwhile end no search.

    :param mount: where to look, below it
    :param beginning: of the names
    """
    return [
        Path(folder, name)
        for folder, names, _ in os.walk(mount)
        for name in names
        if name.startswith(beginning)
    ]


def remove_group(folder: Path) -> None:
    """
    Remove a group and the groups below it; those that hold processes stay.

    :param folder: the group's folder
    """
    for parent, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(parent)  # noqa: PTH106 - a group's folder is removed with its files


def _delegate(folder: Path) -> None:
    """Let a version 2 group's children have the controllers that jobs need."""
    control = folder / "cgroup.subtree_control"
    enabled = control.read_text(encoding="utf-8").split()
    for controller in ("cpu", "cpuset", "memory", "pids"):
        if controller not in enabled:
            with contextlib.suppress(OSError):  # what matters is found out by using it
                _write(control, f"+{controller}")


def _write(path: Path, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
