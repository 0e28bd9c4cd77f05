"""The public measurements and what the analysis finds in them."""

from pathlib import Path

import pandas as pd
import pytest

from env.errors import InputError
from training.analysis.curves import average, knee_qps, saturation_qps, slo_qps
from training.analysis.findings import (
    breaches,
    curves,
    knees,
    normalised,
    queueing,
    safe_jobs,
    speedups,
)
from training.analysis.queueing import mmm
from training.machine.published import conclude, read

SHARED = Path(__file__).parents[3] / "../shared/data"


def latency_row(beside: str, target: float, p95_us: float, served: float = 1.0) -> dict:
    return {
        "source": "here",
        "threads": 1,
        "cores": 1,
        "beside": beside,
        "rep": 0,
        "target_qps": target,
        "achieved_qps": served * target,
        "avg_us": p95_us / 2.0,
        "p95_us": p95_us,
    }


def test_means_carry_student_t_intervals() -> None:
    rows = [latency_row("none", 1e4, p95) for p95 in (100.0, 110.0, 120.0)]
    point = average(pd.DataFrame(rows), ["beside", "target_qps"]).iloc[0]
    assert point["p95_us"] == pytest.approx(110.0)
    assert point["p95_us_ci"] == pytest.approx(4.303 * 10.0 / 3**0.5, rel=1e-3)
    single = average(pd.DataFrame(rows[:1]), ["beside", "target_qps"]).iloc[0]
    assert pd.isna(single["p95_us_ci"])


def test_the_knee_lies_between_calm_and_plateau() -> None:
    qps = pd.Series(range(10, 130, 10)).to_numpy(float) * 1e3
    p95 = pd.Series([300.0] * 8 + [1500.0] * 4).to_numpy()
    assert 80e3 < knee_qps(qps, p95) < 90e3
    assert pd.isna(knee_qps(qps, pd.Series([300.0] * 12).to_numpy()))


def test_saturation_is_only_told_where_it_was_reached() -> None:
    asked = pd.Series([50e3, 100e3, 120e3, 140e3, 160e3]).to_numpy()
    assert saturation_qps(asked, asked.clip(max=110e3)) == pytest.approx(110e3)
    assert pd.isna(saturation_qps(asked, asked))


def test_load_within_the_slo() -> None:
    qps = pd.Series([1e4, 2e4, 3e4]).to_numpy()
    assert slo_qps(qps, pd.Series([1.0, 2.0, 4.0]).to_numpy(), 3.0) == pytest.approx(2.5e4)
    assert slo_qps(qps, pd.Series([1.0, 2.0, 3.0]).to_numpy(), 3.0) == pytest.approx(3e4)
    assert pd.isna(slo_qps(qps, pd.Series([5.0, 6.0, 7.0]).to_numpy(), 3.0))


def test_a_load_that_is_not_served_breaks_the_slo_whatever_its_latency() -> None:
    rows = [latency_row("cpu", 4e4, 500.0, served=0.8), latency_row("l2", 4e4, 500.0)]
    found = breaches(curves(pd.DataFrame(rows)), [4e4], 2000.0).set_index("beside")["breaks"]
    assert found["cpu"] and not found["l2"]


def test_jobs_are_compared_with_themselves_alone_and_ranked() -> None:
    rows = []
    for job, alone, cpu, llc in (("a", 10.0, 20.0, 11.0), ("b", 50.0, 52.0, 150.0)):
        for beside, seconds in (("none", alone), ("cpu", cpu), ("llc", llc)):
            rows.append(("here", job, 1, beside, seconds))
    rows.append(("elsewhere, without a baseline", "a", 1, "cpu", 99.0))
    jobs = pd.DataFrame(rows, columns=["source", "job", "threads", "beside", "real_s"])
    table = normalised(jobs)
    assert table.loc["a", "cpu"] == pytest.approx(2.0)
    assert [job for job, _ in safe_jobs(table, ["cpu"])] == ["b", "a"]
    assert [job for job, _ in safe_jobs(table, ["llc"])] == ["a", "b"]


def test_speedup_is_relative_to_one_thread_of_the_same_source() -> None:
    rows = [("x", "a", 1, "none", 10.0), ("x", "a", 2, "none", 5.0)]
    rows += [("y", "a", 1, "none", 30.0), ("y", "a", 2, "none", 20.0)]
    table = speedups(pd.DataFrame(rows, columns=["source", "job", "threads", "beside", "real_s"]))
    two = table[table["threads"] == 2].iloc[0]
    assert (two["speedup"], two["n"]) == (pytest.approx(1.75), 2)


def test_a_curve_of_a_queue_is_explained_by_that_queue() -> None:
    rows = []
    for load in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        steady = mmm(load * 1e5, 1e-5)
        row = latency_row("none", load * 1e5, 1e6 * steady.response_s * 3.0)
        rows.append(row | {"avg_us": 1e6 * steady.response_s, "cpu_util_pct": 100.0 * load})
    (found,) = queueing(curves(pd.DataFrame(rows)))
    assert found.servers == 1
    assert "holds over the whole sweep" in found.comparisons[0].verdict()
    table = found.rows()
    mm1 = table[table["model"] == "M/M/1"]
    assert mm1["predicted_utilisation"].max() == pytest.approx(0.95, abs=0.02)


def test_a_folder_without_tables_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no table latency_curves"):
        read(tmp_path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the public tables")
def test_the_reference_report_and_the_analysis_agree() -> None:
    checks = conclude(read(SHARED))
    stated = checks[checks["agrees"].notna()]
    assert len(stated) == 9
    assert stated["agrees"].all(), checks.to_string()


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the public tables")
def test_cpu_and_l1i_are_what_hurts_most_in_every_group() -> None:
    found = knees(curves(read(SHARED).interference), 2000.0)
    saturation = found.pivot(index="source", columns="beside", values="saturation_qps")
    both = saturation[["cpu", "l1i", "membw"]].dropna()
    assert len(both) >= 10
    assert (both[["cpu", "l1i"]].max(axis=1) < both["membw"]).all()


LOADS = range(10_000, 60_000, 10_000)
TABLES = {
    "latency_curves": "repo,path,threads,cores,rep,target_qps,achieved_qps,p95_us,year,"
    "cpu_util_pct\n"
    + "".join(f"1,2,1,1,0,{load},{load},400,{{year}},{{number}}\n" for load in LOADS),
    "memcached_interference": "repo,year,interference,rep,target_qps,achieved_qps,p95_us\n"
    + "".join(f"1,{{year}},cpu,0,{load},{load},{{number}}\n" for load in LOADS),
    "job_interference": "repo,year,job,interference,real_s\n1,{year},2,none,{number}\n",
    "job_scaling": "repo,year,machine,job,threads,real_s,user_s,sys_s,path\n"
    "1,{year},m,2,{number},60,50,1,p\n",
    "job_pairs": "repo,job,colocated_with(no=alone),time_s\n1,2,no,{number}\n",
}


@pytest.mark.parametrize("number", ["90", "fast", "9" * 400, "1e999", ""])
def test_a_folder_without_the_reports_group_is_read_whatever_its_numbers_are(
    tmp_path: Path, number: str
) -> None:
    for name, table in TABLES.items():
        (tmp_path / f"{name}.csv").write_text(table.format(year=2025, number=number))
    found = conclude(read(tmp_path)).set_index("conclusion")["found"]
    assert found["sources over 2 ms at 40K QPS"] == "none"
    assert pd.isna(found["knee, cpu [QPS]"])


def test_a_table_of_others_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    for name, table in TABLES.items():
        (tmp_path / f"{name}.csv").write_text(table.format(year=2025, number=1))
    (tmp_path / "job_pairs.csv").write_text("repo,job\n1,2\n")
    with pytest.raises(InputError, match=r"job_pairs\.csv: missing columns: colocated_with"):
        read(tmp_path)


def test_scans_of_nobody_are_left_out_and_said(tmp_path: Path) -> None:
    for name, table in TABLES.items():
        (tmp_path / f"{name}.csv").write_text(table.format(year=2025, number=1))
    with (tmp_path / "latency_curves.csv").open("a") as table:
        table.write(",2,1,1,0,70000,70000,400,2025,1\n1,,1,1,0,80000,80000,400,2025,1\n")
    published = read(tmp_path)
    assert len(published.scans) == len(LOADS)
    assert "latency_curves: 2 left out: repo or path is missing" in published.remarks
