"""What is known about the public logs beyond what they say: the file `known_faults.yaml`."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from env.errors import InputError, validation_message
from env.inputs.yaml_files import read_yaml

FILE = Path(__file__).with_suffix(".yaml")


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GroupFault(_Entry):
    """
    What is known to be wrong in one group's logs.

    :param reason: shown and stored, empty if nothing is wrong
    :param service_cores: memcached's true vCPUs where the logged ones are not, else `None`
    :param moves_logged: memcached's vCPUs, logged or corrected, are sure enough to judge latency by
    :param yields: jobs left memcached's vCPUs although their logged cpusets hold them
    :param background: batch jobs ran at background weight (cpu_shares 2 beside 1024)
    """

    reason: str
    service_cores: tuple[int, ...] | None = None
    moves_logged: bool = True
    yields: bool = False
    background: bool = False


class _ScanPattern(_Entry):
    repo: str
    path: str
    reason: str


class ScanLeftOut(_ScanPattern):
    """
    A group's scans that are left out.

    :param repo: the group
    :param path: pattern that a scan's path contains
    :param threads: of memcached
    :param cores: vCPUs of memcached
    :param reason: shown and stored
    """

    threads: int
    cores: int

    def rows(self, scans: pd.DataFrame) -> pd.Series:
        """
        Which rows of the table of scans are this fault's.

        :param scans: the table of scans
        :return: bool per row
        """
        return (
            (scans["repo"] == self.repo)
            & scans["path"].str.contains(self.path)
            & (scans["threads"] == self.threads)
            & (scans["cores"] == self.cores)
        )


class ScanVm(_ScanPattern):
    """
    A group's scans that ran on another VM than its first.

    :param repo: the group
    :param path: pattern that a scan's path contains
    :param vm: what the VM is called here
    :param reason: how that is known
    """

    vm: str


class InterferenceLeftOut(_Entry):
    """A group whose rows of one table of interference are left out."""

    table: str
    repo: str
    reason: str


class KnownFaults(_Entry):
    """
    The whole file.

    :param groups: what is wrong in a group's logs, by group
    :param unlogged_moves: runs that do not log memcached's moves, by the beginning of their names
    :param suspicious: runs that no allocation explains, by their names
    :param quiet_after_jobs: groups whose intervals after the last job are used
    :param scans_left_out: scans that are not used
    :param scan_vms: scans that did not run on a group's first VM
    :param interference_left_out: rows of tables of interference that are not used
    """

    groups: dict[str, GroupFault]
    unlogged_moves: dict[str, str]
    suspicious: dict[str, str]
    quiet_after_jobs: dict[str, str]
    scans_left_out: tuple[ScanLeftOut, ...]
    scan_vms: tuple[ScanVm, ...]
    interference_left_out: tuple[InterferenceLeftOut, ...]

    def of_group(self, group: str) -> GroupFault:
        """
        What is wrong in a group's logs; nothing, for most.

        :param group: name of the group
        """
        return self.groups.get(group, GroupFault(reason=""))

    def infers_moves(self, run: str) -> bool:
        """
        Whether a run's moves of memcached have to be inferred from its jobs.

        :param run: name of the run
        """
        return run.startswith(tuple(self.unlogged_moves))

    def scan_vm(self, repo: str, path: str) -> str:
        """
        The VM that a scan ran on, named by group and letter.

        :param repo: name of the group
        :param path: the scan's path
        """
        for known in self.scan_vms:
            if repo == known.repo and re.search(known.path, path):
                return f"{repo} {known.vm}"
        return f"{repo} a"


def load_known_faults(path: Path) -> KnownFaults:
    """
    Read and check such a file.

    :param path: YAML
    :raises InputError: one line that names the file, the field and what is wrong
    """
    content = read_yaml(path, "what is known about the logs")
    try:
        return KnownFaults.model_validate(content)
    except ValidationError as error:
        raise InputError(validation_message(path, error)) from None


@functools.cache
def known_faults() -> KnownFaults:
    """What is known about the public logs, read once."""
    return load_known_faults(FILE)
