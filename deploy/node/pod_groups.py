"""
Where pods' control groups are, and what they hold.

The kubelet makes one group for each pod below one for each class of service, and the container
runtime makes groups for the containers below it. Their names depend on the driver:

    cgroupfs  /kubepods/burstable/pod12345678-...-123456789abc/CONTAINER
    systemd   /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12345678_....slice/
              cri-containerd-CONTAINER.scope

and both may lie below further groups (the kubelet's `cgroupRoot`). Names are recognised, not made,
so neither driver nor root must be known.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from deploy.jobs.placement import GroupPlacement
from deploy.linux.cgroups import (
    IDLE_FILE,
    LEAST_WEIGHT,
    JobGroup,
    group_weight,
    is_idle,
    parse_cpus,
    write_cpuset,
)
from env.allocation import Weight

ROOT = "kubepods"
"""Is in the name of the group that all pods' are below."""

HEX = "[0-9a-f]"
POD = re.compile(
    rf"(?:[A-Za-z0-9_-]+-)?pod({HEX}{{8}}(?:[-_]{HEX}{{4}}){{3}}[-_]{HEX}{{12}}|{HEX}{{32}})"
    r"(?:\.slice)?"
)

QUOTA_FILE = {1: "cpu.cfs_quota_us", 2: "cpu.max"}
CPUSET_FILE = "cpuset.cpus"


def uid_in(name: str) -> str:
    """
    The uid of the pod that a group is of, judging by its name; empty if it is no pod's.

    :param name: the last part of the group's path
    """
    found = POD.fullmatch(name)
    return found[1].replace("_", "-") if found else ""


def find_pods(mount: Path) -> dict[str, PurePosixPath]:
    """
    The groups of all pods, by uid.

    Below a pod's own group nothing is looked at: what is there may be of its containers' making.

    :param mount: where groups are mounted, see `Hierarchy.mounts`
    """
    found: dict[str, PurePosixPath] = {}
    for folder, names, _ in os.walk(mount):
        path = PurePosixPath("/") / Path(folder).relative_to(mount)
        if any(ROOT in part for part in path.parts):
            found |= {uid: path / name for name in names if (uid := uid_in(name))}
        names[:] = [name for name in names if not uid_in(name)]
    return found


@dataclass
class PodGroup(JobGroup):
    """The group of a pod, which its kubelet has made and removes."""

    def missing(self) -> str:
        """What keeps the group from being used, in words; empty if nothing does."""
        if not self.cpuset_files():
            return "no container of it is there"
        files = self.weight_file, self.quota_file, self.freezer_file, self.cpuset_files()[0]
        return next((f"{file} is not there" for file in files if not file.exists()), "")

    def cpuset_files(self) -> list[Path]:
        """
        The files that hold its vCPUs.

        Version 2's containers have at most what their pod has. Version 1 refuses a pod less than
        its containers have, so theirs are written.
        """
        folder = self.hierarchy.folder(self.path, "cpuset")
        if self.hierarchy.version == 2:
            return [folder / CPUSET_FILE]
        return sorted(folder.glob(f"*/{CPUSET_FILE}"))

    def weighs(self, weight: Weight) -> bool:
        """
        Whether exactly that is in force which `set_weight` writes.

        :param weight: what was written
        :raises OSError: if the group is gone
        """
        if self.weight_file.with_name(IDLE_FILE).exists():
            idle = is_idle(self.hierarchy, self.path)
            return idle if weight == Weight.BACKGROUND else self.weight() == weight
        least = LEAST_WEIGHT[self.hierarchy.version]
        wanted = least if weight == Weight.BACKGROUND else self.normal_weight
        return group_weight(self.hierarchy, self.path) == wanted

    @property
    def quota_file(self) -> Path:
        """The file of its CPU limit."""
        return self.hierarchy.folder(self.path) / QUOTA_FILE[self.hierarchy.version]

    def held(self) -> dict[str, str]:
        """
        What the files hold that we write to, by path.

        :raises OSError: if the group is gone
        """
        files = [self.quota_file, *self.cpuset_files(), self.freezer_file]
        return self.held_weight() | {str(file): file.read_text(encoding="utf-8") for file in files}

    def held_weight(self) -> dict[str, str]:
        """
        The part of it that says how much the group weighs; an idle group refuses a weight.

        :raises OSError: if the group is gone
        """
        idle = self.weight_file.with_name(IDLE_FILE)
        held = {str(idle): idle.read_text(encoding="utf-8")} if idle.exists() else {}
        if held.get(str(idle), "0").strip() == "0":
            held[str(self.weight_file)] = self.weight_file.read_text(encoding="utf-8")
        return held


class PodPlacement(GroupPlacement):
    """
    A pod's place, beside the kubelet, which may write to the same files.

    :param group: the pod's
    :param had: what the files held that we write to; brought up to date by `rewritten`
    """

    def __init__(self, group: PodGroup, had: dict[str, str]):
        super().__init__(group, group.hierarchy.folder(group.path, "cpuset"))
        self._pod, self._had = group, had

    def set_cores(self, cores: tuple[int, ...]) -> None:
        """See `Placement.set_cores`; :raises OSError: if the pod is gone."""
        for file in self._pod.cpuset_files():
            write_cpuset(file.parent, cores)

    def unpin(self) -> int:
        """See `Placement.unpin`: what a pod does to itself could not be put back."""
        return 0

    def set_quota(self, vcpus: float | None) -> None:
        """See `Placement.set_quota`: without a limit of ours the pod has its own."""
        if vcpus is None:
            file = self._pod.quota_file
            file.write_text(self._had[str(file)], encoding="utf-8")
        else:
            self._pod.set_quota(vcpus)

    def rewritten(self, cores: tuple[int, ...], weight: Weight) -> bool:
        """
        Whether somebody else has written vCPUs or weight since we did.

        What they wrote is what is put back in the end.

        :param cores: what we wrote last; empty if nothing yet
        :param weight: what we wrote last
        :raises OSError: if the pod is gone
        """
        others = {} if self._pod.weighs(weight) else self._pod.held_weight()
        for file in self._pod.cpuset_files() if cores else ():
            text = file.read_text(encoding="utf-8")
            if parse_cpus(text) != tuple(sorted(cores)):
                others[str(file)] = text
        self._had.update(others)
        return bool(others)
