"""Scans of memcached alone: p95 against load, and the largest throughput, on VMs of one year."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from env.errors import InputError
from training.analysis.curves import saturation_qps
from training.calibration.logs.course import SIBLINGS
from training.calibration.logs.known_faults import known_faults
from training.calibration.logs.tables import (
    NAMELESS,
    Remark,
    nameless,
    numbers,
    numeric,
    p95_faults,
    read_table,
    without,
)
from training.calibration.priors import IDLE_SD, SPEED_SD, SPEED_SD_ELSE

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Scans:
    """Scans of memcached alone, one entry per point; `saturated` has one entry per scan."""

    vm_names: tuple[str, ...]
    vm: IntArray
    threads: IntArray
    cores: IntArray
    qps: FloatArray
    p95_us: FloatArray
    speed_sd: float  # prior for ln(speed) of a VM
    saturated: IntArray  # index of a point of the scan
    capacity: FloatArray
    siblings: IntArray = field(default_factory=lambda: SIBLINGS)
    idle_sd: float = IDLE_SD  # prior for ln(idle latency) of a VM
    client: FloatArray | None = None  # of the last vCPU, where the load generator runs there

    def groups(self) -> list[str]:
        """Group of each VM."""
        return [name.split(" ")[0] for name in self.vm_names]

    def of_vm(self, vm: int) -> Scans:
        """
        The scans of one VM, numbered 0, with two threads, as memcached ran.

        :param vm: number of the VM in `vm_names`
        """
        rows = np.flatnonzero((self.vm == vm) & (self.threads == 2))
        place = {int(row): n for n, row in enumerate(rows)}
        kept = [n for n, row in enumerate(self.saturated) if int(row) in place]
        return replace(
            self,
            vm_names=(self.vm_names[vm],),
            vm=np.zeros(len(rows), dtype=np.int64),
            threads=self.threads[rows],
            cores=self.cores[rows],
            qps=self.qps[rows],
            p95_us=self.p95_us[rows],
            saturated=np.array([place[int(self.saturated[n])] for n in kept], dtype=np.int64),
            capacity=self.capacity[kept],
            client=None if self.client is None else self.client[rows],
        )


def read_points(folder: Path, year: int, remarks: list[Remark]) -> pd.DataFrame:
    """
    Read the points of one year's scans; what is left out goes to `remarks`.

    :param folder: folder of measured tables
    :param year: the year to read
    :param remarks: receives what is left out
    :raises InputError: the table is missing or has none that can be used
    """
    table = read_table(folder, "latency_curves")
    # Scans without a year are Soufiane-Barrada's one-thread scans of 2025.
    table = table[numbers(table["year"]).fillna(2025) == year]
    if table.empty:
        raise InputError(f"{folder}: latency_curves: no scans of {year}")
    columns = ("threads", "cores", "rep", "target_qps", "achieved_qps", "p95_us")
    table = numeric(table, "latency_curves", columns, remarks, "path")
    faults = ((nameless(table), NAMELESS), *p95_faults(table["p95_us"]))
    table = without(table, "latency_curves", faults, remarks, "path")
    if table.empty:
        raise InputError(f"{folder}: no usable scans of {year}: {remarks[-1]}")
    return table


def read_scans(folder: Path, year: int, remarks: list[Remark]) -> Scans:
    """
    Read the scans of one year; what is left out goes to `remarks`.

    :param folder: folder of measured tables
    :param year: the year to read
    :param remarks: receives what is left out
    :raises InputError: the table is missing or has none that can be used
    """
    table = read_points(folder, year, remarks)
    table = table[table["cores"] <= 2]
    faults = known_faults()
    for scan in faults.scans_left_out:
        hit = scan.rows(table)
        for path in sorted(table.loc[hit, "path"].unique()):
            remarks.append(Remark("latency_curves", path, -1, f"left out: {scan.reason}"))
        table = table[~hit]
    table = table.sort_values(["repo", "path", "rep", "target_qps"], kind="stable")
    table = table.reset_index(drop=True)
    vm = [
        faults.scan_vm(repo, path) for repo, path in zip(table["repo"], table["path"], strict=True)
    ]
    names = tuple(sorted(set(vm)))
    saturated = []
    capacity = []
    for _, scan in table.groupby(["repo", "path", "rep"], sort=True):
        most = saturation_qps(scan["target_qps"].to_numpy(), scan["achieved_qps"].to_numpy())
        if not np.isnan(most):
            saturated.append(int(scan.index[0]))
            capacity.append(most)
    return Scans(
        vm_names=names,
        vm=np.array([names.index(name) for name in vm], dtype=np.int64),
        threads=table["threads"].to_numpy(np.int64),
        cores=table["cores"].to_numpy(np.int64),
        qps=table["target_qps"].to_numpy(np.float64),
        p95_us=table["p95_us"].to_numpy(np.float64),
        speed_sd=SPEED_SD.get(year, SPEED_SD_ELSE),
        saturated=np.array(saturated, dtype=np.int64),
        capacity=np.array(capacity),
    )


def cpu_limit(folder: Path, year: int) -> float:
    """
    CPU use per vCPU at saturation, as memcached's own clock shows it: median over scans.

    :param folder: folder of measured tables
    :param year: the year to read
    :return: CPU seconds per second and vCPU; 0.8 where the scans do not show it
    :raises InputError: the table is missing or has none that can be used
    """
    table = read_points(folder, year, [])
    table = table[(table["threads"] == 2) & (table["cores"] <= 2)]
    table = table.assign(cpu_util_pct=numbers(table["cpu_util_pct"]))
    uses = []
    for _, scan in table.groupby(["repo", "path", "rep"], sort=True):
        full = scan["target_qps"] > 1.05 * scan["achieved_qps"].max()
        use = (scan["cpu_util_pct"] / 100.0 / scan["cores"])[full].dropna()
        if len(use) >= 3:
            uses.append(float(use.median()))
    return float(np.median(uses)) if uses else 0.8
