"""
Fitting and replaying: known parameters come back, logs are read with care, runs are replayed.

The tables here are made up: runs of a job model whose parameters are known.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from env.errors import InputError
from env.physics.parameters import LAUNCH_OVERHEAD_S, WORK_S
from env.physics.service import IDLE_US, VM_SPEED
from env.simulator.profile import Scatter, load_profile, save_profile
from training.calibration import fit_jobs as fitting
from training.calibration import fit_service
from training.calibration import validation as validation
from training.calibration import year_profile as calibration
from training.calibration.fit_jobs import Scaling, duration_errors, fit_jobs, host_parameters
from training.calibration.intervals import cut_intervals
from training.calibration.job_states import build_states
from training.calibration.logs.course import JOBS
from training.calibration.logs.run_logs import core_mask, read_runs, whole_intervals
from training.calibration.logs.tables import Remark, read_table, summarise
from training.calibration.logs.traces import RunTrace
from training.calibration.priors import FREE, HOST_PRIORS
from training.calibration.replay import replay
from training.calibration.run_parameters import KnownVms, profile_fit, vm_types
from training.calibration.scans import read_points, read_scans
from training.calibration.scores import Tally
from training.calibration.service_problem import Problem
from training.calibration.validation import validate
from training.calibration.year_profile import calibrate, check

CAPACITY_QPS = (120e3, 180e3, 200e3, 200e3)
PROFILE = load_profile("cca-2025")
SERVER = "n2-highmem-4"


def occupancy(qps, width):
    return np.minimum(1.0, qps / CAPACITY_QPS[width - 1])


def write_tables(folder: Path, runs: int = 1, group: str = "someone/else") -> Path:
    """A folder with runs that hold every job once, two at a time."""
    rows, intervals, events = [], [], []
    for number in range(runs):
        run = f"{group.split('/')[0]}-{number}"
        rows.append((run, group, "2025-05-01T10:00:00", SERVER, "yes"))
        for i in range(100):
            qps = (20e3, 90e3, 60e3)[(i + number) % 3]
            intervals.append((run, i, 10.0 * i, 10.0 * (i + 1), qps, 400.0))
        events.append((run, 0.0, "start", "memcached", "0", 2))
        clock = {0b0010: 5.0, 0b1100: 5.0 + number}
        for k, job in enumerate(JOBS):
            mask, text, threads = (0b0010, "1", 1) if k % 2 else (0b1100, "2;3", 2)
            length = 60.0 + 20.0 * k
            events.append((run, clock[mask], "start", job, text, threads))
            if job == "canneal":
                events.append((run, clock[mask] + 10.0, "pause", job, "", None))
                events.append((run, clock[mask] + 30.0, "unpause", job, "", None))
            events.append((run, clock[mask] + length, "end", job, "", None))
            clock[mask] += length + 0.5
    folder.mkdir(exist_ok=True)
    columns = ["run", "repo", "date", "server", "valid"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "runs.csv", index=False)
    columns = ["run", "i", "t_start_s", "t_end_s", "target_qps", "p95_us"]
    pd.DataFrame(intervals, columns=columns).to_csv(folder / "intervals.csv", index=False)
    columns = ["run", "t_s", "event", "job", "cores", "threads"]
    pd.DataFrame(events, columns=columns).to_csv(folder / "events.csv", index=False)
    return folder


def edit(folder: Path, table: str, change) -> None:
    """Change one table in place."""
    path = folder / f"{table}.csv"
    frame = pd.read_csv(path)
    changed = change(frame)
    (frame if changed is None else changed).to_csv(path, index=False)


def runs_of(folder: Path):
    return read_runs(folder, JOBS, (2025,), SERVER)


# --- fit -----------------------------------------------------------------------------------------


def made_up(folder: Path, groups: int = 3):
    """Runs whose durations are those of the profile's own parameters, without noise."""
    traces = []
    for number in range(groups):
        tables = runs_of(write_tables(folder / str(number), 2, f"group{number}/repo"))
        traces += list(tables.runs)
    states = build_states(traces, occupancy)
    truth = PROFILE.job_array(JOBS)
    host = host_parameters({name: PROFILE.host[name].value for name in HOST_PRIORS})
    states.measured_s[:] = fitting.predict(states, truth, host)
    job = np.repeat(np.arange(len(JOBS)), 4)
    threads = np.tile([1, 2, 4, 8], len(JOBS))
    scaling = Scaling(job, threads, np.ones(len(job)))
    scaling.seconds[:] = fitting.predict_scaling(scaling, truth, host)
    return states, scaling, truth


def test_known_parameters_are_found(tmp_path):
    states, scaling, truth = made_up(tmp_path)
    fit = fit_jobs(states, scaling)
    assert fit.converged
    assert np.median(np.abs(duration_errors(states, fit))) < 0.03
    alone = [fit.params[k, WORK_S] / truth[k, WORK_S] for k in range(len(JOBS))]
    assert np.median(np.abs(np.array(alone) - 1.0)) < 0.1
    assert (fit.params[:, LAUNCH_OVERHEAD_S] > 0.0).all()


def test_a_fit_repeats_bit_for_bit(tmp_path):
    states, scaling, _ = made_up(tmp_path)
    one, two = fit_jobs(states, scaling), fit_jobs(states, scaling)
    assert (one.params == two.params).all() and one.host == two.host


def test_a_fit_on_a_bound_is_refused(tmp_path):
    states, scaling, _ = made_up(tmp_path)
    fit = fit_jobs(states, scaling)
    check(fit)
    with pytest.raises(ValueError, match=r"bound of vips\.smt: no profile written"):
        check(type(fit)(**{**vars(fit), "at_bound": ("vips.smt",)}))
    with pytest.raises(ValueError, match="did not converge: no profile written"):
        check(type(fit)(**{**vars(fit), "converged": False}))


# --- validation ----------------------------------------------------------------------------------


def test_validation_of_unseen_runs(tmp_path):
    profile = PROFILE.model_copy(update={"scatter": Scatter(mean=0.0, spread=0.05)})
    report = validate(write_tables(tmp_path, 2), profile)
    assert report["runs"] == 2 and len(report["per_run"]) == 2
    assert set(report["per_run"][0]) >= {
        "run",
        "makespan_measured_s",
        "makespan_simulated_s",
        "violations_measured",
        "violations_simulated",
    }
    told = report["violations"]
    assert 0.0 <= told["expected"] <= sum(point["intervals"] for point in told["curve"])
    assert told["groups"].keys() == report["groups"].keys()
    asked = {"balanced_accuracy", "auc", "log_loss", "brier", "expected", "measured"}
    for scores in (told, *told["groups"].values()):
        assert scores.keys() >= asked
    for what in ("job_duration", "makespan", "p95"):
        assert "median_abs_rel_error" in report[what]
    assert json.loads(json.dumps(report)) == report


def test_the_command_line(tmp_path):
    folder = write_tables(tmp_path / "data")
    out = tmp_path / "made" / "for" / "report.json"
    save_profile(PROFILE, tmp_path / "mine.yaml")
    arguments = ["--data", str(folder), "--profile", str(tmp_path / "mine.yaml")]
    validation.main([*arguments, "--json", str(out), "--plots", str(tmp_path / "plots")])
    assert json.loads(out.read_text())["profile"] == "cca-2025"
    assert (tmp_path / "plots" / "durations.png").stat().st_size > 0


def test_nothing_compared_is_no_figure():
    report = Tally(800.0).report("none", {})
    assert report["makespan"]["median_abs_rel_error"] is None
    assert report["violations"]["balanced_accuracy"] is None


# --- bad input -----------------------------------------------------------------------------------


def refused(program, capsys, *arguments) -> str:
    """The one line with which a program refuses its arguments."""
    with pytest.raises(SystemExit) as stopped:
        program.main([str(argument) for argument in arguments])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and said.endswith("\n")
    return said


PROGRAMS = pytest.mark.parametrize(
    ("program", "out"),
    [(calibration, "--out"), (validation, "--json")],
    ids=["calibrate", "validate"],
)


@PROGRAMS
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "events.csv").unlink(), "no table events.csv"),
        (lambda folder: edit(folder, "runs", lambda f: f[:0]), "runs.csv: has no rows"),
        (
            lambda folder: edit(folder, "intervals", lambda f: f.drop(columns="p95_us")),
            "intervals.csv: missing columns: p95_us",
        ),
    ],
)
def test_bad_tables_end_a_program_in_one_line(tmp_path, capsys, program, out, spoil, message):
    folder = write_tables(tmp_path / "data")
    spoil(folder)
    target = tmp_path / "new" / "result"
    said = refused(program, capsys, "--data", folder, "--profile", "cca-2025", out, target)
    assert said.startswith(f"coretide: {folder}") and message in said
    assert not target.exists()


@PROGRAMS
def test_bad_arguments_end_a_program_in_one_line(tmp_path, capsys, program, out):
    folder, target = write_tables(tmp_path / "data"), tmp_path / "result"
    good = {"--data": folder, "--profile": "cca-2025", out: target}
    for option, value, message in (
        ("--data", tmp_path / "nowhere", "nowhere: no such folder"),
        ("--profile", "x", "unknown profile 'x'; known profiles: "),
        (out, tmp_path, f"{tmp_path}: cannot be written (Is a directory)"),
        (out, folder / "runs.csv" / "x", "cannot be written (File exists)"),
    ):
        given = good | {option: value}
        assert message in refused(program, capsys, *(one for pair in given.items() for one in pair))
    assert "required" in refused(program, capsys, "--data", folder)
    assert not target.exists()


def test_only_skipped_runs_are_refused_after_they_were_named(tmp_path, capsys):
    folder = write_tables(tmp_path / "data")
    edit(folder, "events", lambda frame: frame.replace({"job": {"vips": "doom"}}))
    arguments = ["--data", str(folder), "--profile", "cca-2025", "--json", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        validation.main(arguments)
    said = capsys.readouterr()
    assert said.out == "events, run someone-0, row 15: skipped: unknown jobs: doom\n"
    assert said.err == f"coretide: {folder}: no usable runs for profile cca-2025\n"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"converged": False}, "the job fit did not converge"),
        ({"at_bound": ("vips.smt",)}, r"the job fit ended on the bound of vips.smt"),
    ],
)
def test_a_fit_that_fails_writes_no_profile(tmp_path, capsys, monkeypatch, fault, message):
    folder, target = write_tables(tmp_path / "data"), tmp_path / "profile.yaml"
    rows = [("r", 2025, "m", job, 1, 100.0, 100.0, 0.0, "p") for job in JOBS]
    columns = ["repo", "year", "machine", "job", "threads", "real_s", "user_s", "sys_s", "path"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "job_scaling.csv", index=False)
    fitted = SimpleNamespace(service=PROFILE.service, excluded=())
    monkeypatch.setattr(calibration, "scanned_occupancy", lambda *_: occupancy)
    monkeypatch.setattr(calibration, "fit_service", lambda *_: fitted)
    monkeypatch.setattr(calibration, "fit_jobs", lambda *a: replace(fit_jobs(*a), **fault))
    said = refused(calibration, capsys, "--data", folder, "--profile", "cca-2025", "--out", target)
    assert f"{message}: no profile written" in said
    assert not target.exists()


def write_scans(folder: Path, p95_us: float) -> None:
    """One scan with two threads."""
    rows = [("r", "scan.txt", 2, 1, 0, q, q, p95_us, 2025, np.nan) for q in (5e3, 1e4)]
    columns = ["repo", "path", "threads", "cores", "rep", "target_qps", "achieved_qps", "p95_us"]
    columns += ["year", "cpu_util_pct"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "latency_curves.csv", index=False)


def test_a_fit_of_memcached_that_fails_is_refused(tmp_path):
    write_scans(tmp_path, 400.0)
    scans = read_scans(tmp_path, 2025, [])
    problem = Problem(scans, cut_intervals((), (), 800.0, {}))
    x = problem.solve(3.0)
    fit_service.check(problem, x)
    x[FREE.index("smt")] = 0.0
    with pytest.raises(InputError, match=r"fit ended on the bound of smt: no profile written"):
        fit_service.check(problem, x)
    problem.converged = False
    with pytest.raises(InputError, match="fit did not converge: no profile written"):
        fit_service.check(problem, x)


def test_points_of_a_scan_in_other_units_are_dropped_and_named(tmp_path):
    write_scans(tmp_path, 400.0)
    edit(tmp_path, "latency_curves", lambda frame: frame.__setitem__("p95_us", [400.0, 0.4]))
    remarks: list[Remark] = []
    assert len(read_points(tmp_path, 2025, remarks)) == 1
    dropped = "latency_curves, run scan.txt, row 1: dropped: p95 under 20 us: in ms?"
    assert [str(remark) for remark in remarks] == [dropped]
    write_scans(tmp_path, 0.4)
    with pytest.raises(InputError, match="no usable scans of 2025: latency_curves, run scan"):
        read_points(tmp_path, 2025, [])
    with pytest.raises(InputError, match="no scans of 2024"):
        read_points(tmp_path, 2024, [])


def test_a_summary_names_the_first_row_of_three_runs():
    remarks = [Remark("events", f"r{n}", row, "odd") for n in range(4) for row in (2 * n, 9)]
    assert summarise(remarks, rows=True) == [
        "events: odd: 8 times in 4 runs (r0 row 0, r1 row 2, r2 row 4, ...)"
    ]
    assert summarise(remarks) == ["events: odd: 8 times in 4 runs (r0, r1, r2, ...)"]
    assert summarise(remarks[:1]) == ["events, run r0, row 0: odd"]


def test_missing_tables_and_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no table runs\.csv"):
        runs_of(tmp_path)
    folder = write_tables(tmp_path)
    edit(folder, "events", lambda frame: frame.drop(columns=["t_s", "cores"]))
    with pytest.raises(ValueError, match=r"events\.csv: missing columns: t_s, cores"):
        runs_of(folder)
    folder = write_tables(tmp_path)
    edit(folder, "intervals", lambda frame: frame[:0])
    with pytest.raises(ValueError, match=r"intervals\.csv: has no rows"):
        runs_of(folder)
    (folder / "runs.csv").write_text("")
    with pytest.raises(ValueError, match=r"runs\.csv: cannot be read"):
        runs_of(folder)


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("intervals", lambda f: f.__setitem__("p95_us", f.p95_us / 1e3), "more than half"),
        ("intervals", lambda f: f.__setitem__("t_end_s", f.t_start_s - 1), "more than half"),
        ("intervals", lambda f: f.__setitem__("t_start_s", f.t_start_s * 0.5), "overlap"),
        ("intervals", lambda f: f.__setitem__("run", "other"), "it has no intervals"),
        ("events", lambda f: f.__setitem__("run", "other"), "it has no events"),
        ("events", lambda f: f.replace({"job": {"vips": "doom"}}), "unknown jobs: doom"),
        ("events", lambda f: f.__setitem__("job", 7), "unknown jobs: 7"),
        ("events", lambda f: pd.concat([f, f]), "starts twice"),
        ("events", lambda f: f.replace({"cores": {"2;3": "7"}}), "names vCPU 7"),
        ("events", lambda f: f.replace({"event": {"end": "stop"}}), "no job starts and ends"),
        ("runs", lambda f: f.__setitem__("valid", "NO: odd"), "marked not valid"),
    ],
)
def test_unusable_runs_are_skipped_and_named(tmp_path, table, change, message):
    folder = write_tables(tmp_path)
    edit(folder, table, change)
    tables = runs_of(folder)
    assert not tables.runs
    remarks = [str(remark) for remark in tables.remarks if "skipped" in remark.what]
    assert len(remarks) == 1 and message in remarks[0] and "run someone-0" in remarks[0]
    with pytest.raises(ValueError, match="no usable runs for profile"):
        validate(folder, PROFILE)


def test_odd_rows_are_dropped_and_named(tmp_path):
    folder = write_tables(tmp_path)

    def spoil(frame):
        frame["p95_us"] = frame["p95_us"].astype(object)
        frame.loc[3, "p95_us"] = 0.4
        frame.loc[4, "p95_us"] = -1.0
        frame.loc[5, "p95_us"] = "fast"
        frame.loc[6, "t_end_s"] = 0.0

    edit(folder, "intervals", spoil)
    tables = runs_of(folder)
    assert len(tables.runs[0].qps) == 96
    said = [str(remark) for remark in tables.remarks]
    assert "intervals, run someone-0, row 3: dropped: p95 under 20 us: in ms?" in said
    assert "intervals, run someone-0, row 4: dropped: p95 is not positive" in said
    assert "intervals, run someone-0, row 5: dropped: p95_us is not a number" in said
    assert "intervals, run someone-0, row 6: dropped: the interval ends before it starts" in said


@pytest.mark.parametrize(
    ("table", "column", "value", "dropped"),
    [
        ("intervals", "p95_us", "9" * 400, "p95_us is not a number"),
        ("intervals", "target_qps", "1e999", "target_qps is not a number"),
        ("events", "t_s", "9" * 400, "t_s is not a number"),
        ("events", "threads", "9" * 400, ""),
        ("events", "threads", "inf", ""),
        ("events", "cores", "0;inf;1e999", ""),
        ("events", "cores", f"0;²;{'9' * 400}", ""),
        ("runs", "date", "²²²²", ""),
        ("runs", "date", "0001-01-01T00:00:00", ""),
        ("events", "note", "Job quota percentage 1..2", ""),
    ],
)
def test_a_number_that_no_float_holds_or_is_none_costs_its_row_at_most(
    tmp_path, table, column, value, dropped
):
    folder = write_tables(tmp_path)
    row = {"runs": 0, "intervals": 3, "events": 1}[table]  # the first job's start

    def spoil(frame):
        frame[column] = frame.get(column, pd.Series("", frame.index)).map(
            lambda one: int(one) if isinstance(one, float) and one == one else one
        )
        frame[column] = frame[column].astype(object)
        frame.loc[row, column] = value

    edit(folder, table, spoil)
    said = [str(remark) for remark in read_runs(folder, JOBS).remarks]
    assert not dropped or f"{table}, run someone-0, row {row}: dropped: {dropped}" in said


@pytest.mark.parametrize(("length_s", "row"), [(0.0, 15), (30.0, 16)])
def test_a_negative_duration_skips_the_run(tmp_path, length_s, row):
    folder = write_tables(tmp_path)

    def swap(frame):
        vips = frame["job"] == "vips"
        frame.loc[vips & (frame["event"] == "end"), "t_s"] = frame.loc[vips, "t_s"].min() - length_s

    edit(folder, "events", swap)
    tables = runs_of(folder)
    assert not tables.runs
    assert str(tables.remarks[-1]).endswith(f"row {row}: skipped: vips ends before it starts")


def test_known_traps_are_said(tmp_path):
    tables = runs_of(write_tables(tmp_path, group="KockaAdmiralac/CCA"))
    assert not tables.runs[0].moves_logged
    assert any("only memcached's main thread was moved" in remark.what for remark in tables.remarks)


@pytest.mark.parametrize(("run_s", "asked_s", "count"), [(1000.27, 9.0, 112), (960.4, 2.75, 350)])
def test_a_run_that_ends_within_an_interval_does_not_shorten_the_others(run_s, asked_s, count):
    """1000 s are 112 intervals of 9 s, the last one cut; the log makes them 8.93 s each."""
    mended = whole_intervals(evenly(run_s, count))
    begun_s = run_s % 1.0
    assert mended["t_start_s"].to_numpy() == pytest.approx(begun_s + np.arange(count) * asked_s)
    assert mended["t_end_s"].iloc[-1] == pytest.approx(begun_s + count * asked_s)


def evenly(run_s, count):
    """Intervals as the log gives them: the run over their number."""
    starts = np.arange(count) * run_s / count
    return pd.DataFrame({"t_start_s": starts, "t_end_s": starts + run_s / count})


@pytest.mark.parametrize(("asked_s", "count"), [(1.0, 780), (1.75, 446), (5.0, 180), (10.0, 78)])
@pytest.mark.parametrize("setup_s", [0.0, 0.3, 1.7])
def test_what_a_run_takes_before_its_first_interval_is_not_shared_out(asked_s, count, setup_s):
    """mcperf connects for as long as a run takes beyond its intervals."""
    mended = whole_intervals(evenly(count * asked_s + setup_s, count))
    assert mended["t_start_s"].to_numpy() == pytest.approx(setup_s + np.arange(count) * asked_s)


@pytest.mark.parametrize(
    ("length_s", "count"), [(8.65, 115), (8.65, 20), (1.002, 5), (1.252, 30), (10.1, 90)]
)
def test_other_intervals_are_as_long_as_logged(length_s, count):
    starts = np.arange(count) * length_s
    rows = pd.DataFrame({"t_start_s": starts, "t_end_s": starts + length_s})
    pd.testing.assert_frame_equal(whole_intervals(rows), rows)


def alike(run: RunTrace, count: int) -> list[RunTrace]:
    """Runs that went like one, on one VM."""
    return [replace(run, run=f"{run.run}-{number}") for number in range(count)]


def test_other_runs_of_the_day_show_a_vm(tmp_path):
    """Its speed, its idle latency and how long its jobs take, whatever the run itself measured."""
    fit = profile_fit(PROFILE)
    (run,) = runs_of(write_tables(tmp_path)).runs
    service = fit.physics.service.copy()
    service[VM_SPEED], service[IDLE_US] = 0.7, 1.5 * service[IDLE_US]
    shown = replay(run, replace(fit.physics, service=service), closed=False)
    runs = alike(replace(run, p95_us=shown.p95_us), 4)
    runs[0] = replace(runs[0], p95_us=np.full_like(run.p95_us, 300.0))
    vms = KnownVms(runs, 800.0, fit)
    known, own = vms.traits(runs[0]), vms.on_vm(runs[0])
    assert np.exp(known.mean[0]) == pytest.approx(0.7, abs=0.04)
    assert np.exp(known.mean[1]) == pytest.approx(1.5, abs=0.15)
    measured_s = np.array([job.run_s for job in run.jobs])
    error = np.abs(replay(run, own, closed=False).run_s / measured_s - 1.0)
    unknown = np.abs(replay(run, fit.physics, closed=False).run_s / measured_s - 1.0)
    assert np.median(error) < 0.4 * np.median(unknown)
    alone = KnownVms(runs[:1], 800.0, fit)
    assert (alone.traits(runs[0]).mean == 0.0).all()
    wide, narrow = (np.diag(one.traits(runs[0]).covariance) for one in (alone, vms))
    assert (narrow[:2] < 0.5 * wide[:2]).all()
    np.testing.assert_allclose(narrow[2:], wide[2:])  # memcached had no second vCPU, nor neighbours
    np.testing.assert_array_equal(alone.on_vm(runs[0]).jobs, fit.physics.jobs)


def test_kinds_of_vm_are_clusters_of_speeds():
    assert vm_types(np.array([0.1, -0.3, 0.0, -0.4])) == pytest.approx((-0.35, 0.05))
    assert vm_types(np.zeros(0)) == (0.0,)


def test_memcached_is_unrestricted_before_its_first_logged_move(tmp_path):
    """Before a controller's first act p95 at 110 to 180K is that of two vCPUs, not of one."""
    (run,) = runs_of(write_tables(tmp_path)).runs
    assert run.service_moves == ((-np.inf, 0b0011), (0.0, 0b0001))


def test_core_masks():
    assert core_mask("1;2;3") == 0b1110 and core_mask("2") == 0b0100 and core_mask(1.0) == 0b0010
    assert core_mask("9") == 0 and core_mask(float("nan")) == 0


def test_calibration_names_what_it_lacks(tmp_path):
    with pytest.raises(ValueError, match="unknown profile 'x'; known profiles: cca-2025, cca-2024"):
        calibrate(tmp_path, "x")
    with pytest.raises(ValueError, match="no table runs"):
        calibrate(tmp_path, "cca-2025")
    with pytest.raises(ValueError, match="no table job_scaling"):
        calibrate(write_tables(tmp_path), "cca-2025")
    with pytest.raises(ValueError, match="cannot be read"):
        (tmp_path / "job_scaling.csv.gz").write_bytes(b"no gzip")
        read_table(tmp_path, "job_scaling")
