"""Pods' control groups are recognised by name, whichever driver and version laid them out."""

from __future__ import annotations

import uuid
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.linux.cgroups import Hierarchy, put_back
from deploy.node.pod_groups import PodGroup, PodPlacement, find_pods, uid_in
from env.allocation import Weight

UID = "12345678-9abc-def0-1234-56789abcdef0"
CONTAINER = "0123456789abcdef" * 4
SLICE = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"
BURSTABLE = "kubepods.slice/kubepods-burstable.slice"
LAYOUTS = {
    "cgroupfs": f"kubepods/burstable/pod{UID}/{CONTAINER}",
    "cgroupfs-guaranteed": f"kubepods/pod{UID}/{CONTAINER}",
    "cgroupfs-below-a-root": f"kubelet/kubepods/besteffort/pod{UID}/{CONTAINER}",
    "containerd": f"{BURSTABLE}/{SLICE}/cri-containerd-{CONTAINER}.scope",
    "cri-o": f"{BURSTABLE}/{SLICE}/crio-{CONTAINER}.scope/container",
    "systemd-guaranteed": f"kubepods.slice/{SLICE.replace('-burstable', '')}",
    "systemd-below-a-root": "kubelet.slice/kubelet-kubepods.slice/"
    f"kubelet-kubepods-besteffort.slice/kubelet-{SLICE.replace('burstable', 'besteffort')}",
}
STATIC = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pod_is_found_by_its_uid(layout: str, tmp_path: Path) -> None:
    path = tmp_path / LAYOUTS[layout]
    path.mkdir(parents=True)
    for other in ("system.slice/docker.service", f"kubepods/pod{STATIC}", f"user/pod{UID}"):
        (tmp_path / other).mkdir(parents=True)
    found = find_pods(tmp_path)
    assert found.keys() == {UID, STATIC}
    assert uid_in(found[UID].name) == UID
    assert path.is_relative_to(tmp_path / str(found[UID]).lstrip("/"))


def test_what_a_pod_makes_below_its_own_group_is_no_other_pod(tmp_path: Path) -> None:
    other = str(uuid.UUID(int=7))
    (tmp_path / LAYOUTS["cgroupfs"] / "kubepods" / f"pod{other}").mkdir(parents=True)
    assert find_pods(tmp_path).keys() == {UID}


@given(st.uuids(), st.sampled_from(["", "kubepods-", "kubepods-burstable-", "a-kubepods-"]))
def test_both_spellings_of_a_uid_are_read(uid: uuid.UUID, prefix: str) -> None:
    assert uid_in(f"pod{uid}") == str(uid)
    assert uid_in(f"{prefix}pod{str(uid).replace('-', '_')}.slice") == str(uid)


@given(st.text(alphabet="0123456789abcdefpod-_.slice/", max_size=60))
def test_no_other_name_is_a_pods(name: str) -> None:
    found = uid_in(name)
    assert not found or found.replace("-", "") in name.replace("-", "").replace("_", "")


def test_only_what_somebody_else_wrote_is_remembered(tmp_path: Path) -> None:
    hierarchy = Hierarchy(2, dict.fromkeys(("cpu", "cpuset"), tmp_path))
    files = {
        "cpu.idle": "0\n",
        "cpu.weight": "50\n",
        "cpu.max": "max 100000\n",
        "cpuset.cpus": "\n",
        "cgroup.freeze": "0\n",
    }
    (tmp_path / "pod").mkdir()
    for name, text in files.items():
        (tmp_path / "pod" / name).write_text(text)
    group = PodGroup(hierarchy, PurePosixPath("/pod"), 100)
    assert not group.missing()
    had = group.held()
    assert [Path(one).name for one in had] == list(files), "idle before weight, the freezer last"
    place = PodPlacement(group, had)

    def kubelet(name: str, text: str) -> None:
        (tmp_path / "pod" / name).write_text(text)

    kubelet("cpuset.cpus", "0-1\n")  # as the kernel shows what we have written
    kubelet("cpu.idle", "1\n")
    assert not place.rewritten((1, 0), Weight.BACKGROUND)
    assert had == {str(tmp_path / "pod" / name): text for name, text in files.items()}
    kubelet("cpuset.cpus", "1\n")
    kubelet("cpu.idle", "0\n")
    kubelet("cpu.weight", "79\n")
    assert place.rewritten((0, 1), Weight.BACKGROUND)
    for name in files:
        kubelet(name, "")
    assert put_back(had) == []
    now = {name: (tmp_path / "pod" / name).read_text() for name in files}
    assert now == files | {"cpuset.cpus": "1\n", "cpu.weight": "79\n"}
