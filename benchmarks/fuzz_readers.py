"""
Every reader of files that may come from others, with valid files to begin from (`benchmarks.fuzz`).

The files are small, because reading them takes most of the time.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import math
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from agents.checkpoint import METADATA_ENTRY, TRAINING_ENTRY, WEIGHTS_ENTRY, read_checkpoint
from agents.general_checkpoint import read_general_checkpoint
from agents.parameter_files import PARAMETER_FOLDER
from agents.ppo.attention_network import shapes
from agents.registry import make
from deploy.linux.service_process import Program
from deploy.queue.spool import DONE, JOB, OUTCOME, Ending, Spool
from deploy.queue.submitted import FIELDS, MOST_BYTES, parse_job
from deploy.records import live_view, mcperf, predicted, proof, run_report
from deploy.records.client_join import join, read_client
from deploy.records.recorder import (
    CLIENT_FILE,
    EVENTS_FILE,
    INTERVALS_FILE,
    LOAD_FILE,
    POLICY_FILE,
    PREDICTION_FILE,
    REPORT_FILE,
    SAMPLES_FILE,
    SCENARIO_FILE,
    Recorder,
    read_events,
    read_samples,
    started_at_s,
)
from deploy.records.state import STATE_FILE, JobRecord, ServiceRecord, State, read_state
from deploy.tap.latency_tap import TapCounts
from env.allocation import Allocation, JobAllocation
from env.cluster.cluster_scenario import ClusterScenario, load_cluster
from env.cluster.plan import PLAN_FOLDER, load_plan
from env.family.arrivals import COLUMN, read_trace
from env.inputs.text_files import read_text
from env.scenario import (
    CLUSTER_SCENARIOS,
    PROFILE_FOLDER,
    SCENARIO_FOLDER,
    Scenario,
    load_scenario,
    scenario_names,
)
from env.simulator.profile import load_profile
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry
from training.analysis.effects import analyse_file
from training.analysis.findings import speedups
from training.calibration.fit_jobs import read_scaling
from training.calibration.logs.course import JOBS
from training.calibration.logs.run_logs import read_runs
from training.calibration.logs.tables import COLUMNS, Remark, summarise
from training.calibration.scans import cpu_limit, read_scans
from training.machine.published import REPORT, conclude, read
from training.measuring.rounds import Store
from training.recipe import RECIPE_FOLDER, any_recipe
from training.refinement.live_run import read_live_run
from training.study.study_plan import PLANS
from training.study.study_plan import load_plan as load_study
from training.study.study_report import MEASURED, averages
from training.study.study_run import Runs


@dataclass(frozen=True)
class FileReader:
    """
    Reads one kind of file.

    :param name: what the table calls it
    :param file: the file's name in a folder that holds nothing else of a run, but for `beside`
    :param seeds: valid contents
    :param read: reads the folder's file and does with it what commands do
    :param beside: further files of the folder
    """

    name: str
    file: str
    seeds: Sequence[bytes]
    read: Callable[[Path], object]
    beside: dict[str, bytes]


def archive_of(entries: dict[str, bytes]) -> bytes:
    """
    A zip file.

    :param entries: what is in it, by name
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


@functools.cache
def readers() -> tuple[FileReader, ...]:
    """Every reader of files that may come from others; their seeds are small, as reading takes."""
    scenario = load_scenario("cca-2025")
    two_jobs = scenario.model_copy(update={"jobs": scenario.jobs[:2]})
    run = _run_files(two_jobs)
    problem = {SCENARIO_FILE: run[SCENARIO_FILE]}
    client, beside = _client_files(two_jobs)
    kinds: list[tuple[str, str, Sequence[bytes], Callable[[Path], object], dict[str, bytes]]] = [
        ("scenario", "mine.yaml", _scenarios(), _of("mine.yaml", load_scenario), {}),
        ("cluster", "mine.yaml", _clusters(), _of("mine.yaml", load_cluster), {}),
        ("plan", "mine.yaml", _contents(PLAN_FOLDER), _plan, {}),
        ("queued job", "job.yaml", _jobs(scenario), _job, {}),
        ("outcome of a job", "one.json", [_outcome()], _outcomes, {}),
        ("profile", "mine.yaml", _profiles(), _of("mine.yaml", load_profile), {}),
        ("recipe", "mine.yaml", _contents(RECIPE_FOLDER), _of("mine.yaml", any_recipe), {}),
        ("rule", "mine.yaml", _contents(PARAMETER_FOLDER), partial(_rule, scenario), {}),
        ("checkpoint", "mine.zip", [_checkpoint()], _training_state, {}),
        ("general", "mine.zip", [_general()], _of("mine.zip", read_general_checkpoint), {}),
        ("state", STATE_FILE, [_state(scenario)], read_state, {}),
        ("proof", "exit", [b"0\n", b"137\n", b"open\n"], _proof, {}),
        ("tap", "tap.jsonl", [_tap_lines()], _tap, {}),
        ("mcperf", LOAD_FILE, [run[LOAD_FILE]], _load, {}),
        ("mcperf to join", "mcperf.txt", [client], _join, beside),
        ("client.json", CLIENT_FILE, [_joined(client, beside)], read_client, {}),
        ("event log", EVENTS_FILE, [run[EVENTS_FILE]], _events, run),
        ("samples", SAMPLES_FILE, [run[SAMPLES_FILE]], _view, run),
        ("report.json", REPORT_FILE, [run[REPORT_FILE]], partial(_page, two_jobs), run),
        ("scenario.json", SCENARIO_FILE, list(problem.values()), _view, run),
        ("policy.json", POLICY_FILE, [run[POLICY_FILE]], predicted.read_policy, {}),
        ("prediction", PREDICTION_FILE, [run[PREDICTION_FILE]], _prediction, {}),
        *(
            (f"refined {name}", name, [run[name]], read_live_run, run)
            for name in (REPORT_FILE, EVENTS_FILE, SAMPLES_FILE, INTERVALS_FILE)
        ),
        ("arrivals", "trace.csv", [_trace()], _of("trace.csv", read_trace), {}),
        ("arrivals.gz", "trace.csv.gz", _traces(), _of("trace.csv.gz", read_trace), {}),
        ("measured runs", "runs.txt", [_measured_runs()], _measured, {}),
        ("factorial", "runs.csv", [_factorial()], _analysed, {}),
        ("published tables", "tables.txt", [_published()], _concluded, {}),
        ("study", "mine.yaml", _contents(PLANS), _study, {}),
        ("runs of a study", "runs.csv", [_study_runs()], _studied, {}),
        ("plan.json", "plan.json", [json.dumps(PURPOSE).encode()], _characterised, {}),
    ]
    return tuple(FileReader(*kind) for kind in kinds)


PURPOSE: dict[str, object] = {"scenario": "local", "mode": "quick", "factors": ["a", "b"]}


def _of(name: str, read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: read(folder / name)


def _contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.yaml"))]


def _scenarios() -> list[bytes]:
    return [(SCENARIO_FOLDER / f"{name}.yaml").read_bytes() for name in scenario_names()]


def _jobs(scenario: Scenario) -> list[bytes]:
    return [
        yaml.safe_dump(job.model_dump(mode="json", include=set(FIELDS))).encode()
        for job in scenario.jobs
    ]


def _job(folder: Path) -> None:
    """As a queue reads one that was handed in."""
    path = folder / "job.yaml"
    parse_job(path.read_bytes()[: MOST_BYTES + 1], path.name)


def _clusters() -> list[bytes]:
    return [(SCENARIO_FOLDER / f"{name}.yaml").read_bytes() for name in CLUSTER_SCENARIOS]


def _plan(folder: Path) -> None:
    """As a run on a cluster reads it, with the scenario that it names."""
    path = folder / "mine.yaml"
    load_plan(path, _cluster(load_plan(path).scenario))


@functools.cache
def _cluster(name: str) -> ClusterScenario | None:
    return load_cluster(name) if name in CLUSTER_SCENARIOS else None


def _outcome() -> bytes:
    ending = Ending("one", DONE, 0, 1, "then", "later", "now", 0.5, "attempt 1 failed: why")
    return json.dumps(asdict(ending)).encode()


def _outcomes(folder: Path) -> None:
    """As the list of a queue shows it."""
    with Spool(folder / "queue") as spool:
        over = spool.path / DONE
        (over / f"one{JOB}").touch()
        (over / f"one{OUTCOME}").write_bytes((folder / "one.json").read_bytes())
        for line in spool.lines():
            if not line.isprintable():
                raise ValueError(line)


def _profiles() -> list[bytes]:
    """The shipped ones, with their first two entries of each list, job, VM and error of the fit."""
    profiles = []
    for content in _contents(PROFILE_FOLDER):
        profile = yaml.safe_load(content)
        profile.pop("hash", None)  # with it, whatever is changed would be refused for that alone
        for name in ("sources", "fit_error", "excluded", "jobs", "vms"):
            few = list(profile.get(name, ()))[:2]
            if name in profile:
                named = isinstance(profile[name], dict)
                profile[name] = {key: profile[name][key] for key in few} if named else few
        profiles.append(yaml.safe_dump(profile, sort_keys=False).encode())
    return profiles


def _checkpoint() -> bytes:
    """A small one of the shipped one's form, that can be trained further."""
    metadata = read_checkpoint("best.zip").metadata
    n_features, n_actions = metadata["features"], len(metadata["actions"])
    policy = _layers("", ((4, n_features), (n_actions, 4)))
    value = _layers("value_", ((4, n_features), (1, 4)))
    n_weights = (sum(map(math.prod, (*policy.values(), *value.values()))),)
    training = {**value, "adam_mean": n_weights, "adam_square": n_weights, "adam_steps": ()}
    entries = {METADATA_ENTRY: json.dumps(metadata).encode(), WEIGHTS_ENTRY: _zeros(policy)}
    return archive_of({**entries, TRAINING_ENTRY: _zeros(training)})


Shape = tuple[int, ...]


def _layers(prefix: str, sizes: Sequence[tuple[int, int]]) -> dict[str, Shape]:
    """Shapes of a network's arrays by their names."""
    found: dict[str, Shape] = {}
    for index, (outputs, inputs) in enumerate(sizes):
        found[f"{prefix}weight_{index}"] = (outputs, inputs)
        found[f"{prefix}bias_{index}"] = (outputs,)
    return found


def _training_state(folder: Path) -> None:
    """As training goes on from it."""
    read_checkpoint(folder / "mine.zip").read_training_arrays()


def _general() -> bytes:
    """A small network for any scenario."""
    metadata = read_general_checkpoint("general.zip").metadata
    widths = {
        "embed_0_weight": (4, 1), "biases_0": (2, 1), "widen_0_weight": (8, 1), "ask_weight": (8, 1)
    }  # fmt: skip
    sizes = shapes({name: np.zeros(size, np.float32) for name, size in widths.items()})
    return archive_of({METADATA_ENTRY: json.dumps(metadata).encode(), WEIGHTS_ENTRY: _zeros(sizes)})


def _zeros(sizes: Mapping[str, Shape]) -> bytes:
    """An entry with arrays of these shapes."""
    file = io.BytesIO()
    arrays: dict[str, Any] = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    np.savez(file, **arrays)
    return file.getvalue()


def _state(scenario: Scenario) -> bytes:
    state = State("0" * 12, scenario.name, "docker", "unix:///x", 1.0)
    runs = Program((0, 0, 0, 0), "/usr/bin/memcached")
    state.service = [ServiceRecord(1, 1, {1: (0, 1)}, runs)]
    state.jobs = {name: JobRecord(attempts=1, opened=True, key="k") for name in scenario.job_names}
    return json.dumps(asdict(state)).encode()


def _proof(folder: Path) -> None:
    """As the loop reads what a job may have written."""
    proof.begun(folder)
    proof.exit_code(folder)
    proof.trim(folder)


def _tap_lines() -> bytes:
    counted = {"type": "printf", "data": "counted"}
    maps = [{"type": "map", "data": {name: {"7": 3, "8": 1}}} for name in ("@wait", "@latency")]
    said = [{"type": "printf", "data": "1 9000000000 4 1 8000000000 7000000000"}, *maps, counted]
    return b"\n".join(json.dumps(one).encode() for one in said * 3)


def _tap(folder: Path) -> None:
    counts = TapCounts()
    for line in (folder / "tap.jsonl").read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):  # such a line is left out
            counts.take(line)
    counts.late_lately(0.1)


def _recorded(folder: Path, scenario: Scenario, requests: dict[float, float]) -> Recorder:
    """
    The records of a run in which no job runs, still open.

    :param folder: for the records
    :param scenario: the problem
    :param requests: by time since the start [s], how many memcached has answered until then
    """
    recorder = Recorder(folder, scenario, time.monotonic())
    jobs = {job: JobAllocation() for job in scenario.job_names}
    allocation = Allocation((0, 1), jobs)
    cores = (0.1,) * scenario.machine.vcpus
    for time_s, count in requests.items():
        service = ServiceTelemetry(count, 0.2, 0.01, qps=9e4, cpu_cores=0.75, p95_us=800.0)
        done = {job: JobTelemetry(placed.state, 1.0) for job, placed in jobs.items()}
        recorder.sample(Telemetry(time_s, service, cores, done, allocation), allocation)
    return recorder


def _run_files(scenario: Scenario) -> dict[str, bytes]:
    """The files of a small run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = _recorded(folder, scenario, dict.fromkeys((0.1, 1.1, 2.1), 3e4))
        for name in scenario.job_names:
            recorder.event("start", name, (2, 3), 2)
        recorder.event("custom", scenario.job_names[0], detail="attempt 1 failed: why")
        recorder.event("start", scenario.job_names[0], (2, 3), 2)
        for name in scenario.job_names:
            recorder.event("end", name)
        recorder.close()
        start_s = started_at_s(folder)
        rows = [
            mcperf.format_row([1e2, 2e2], 9e3, 9e3, start_s + i, start_s + i + 1, 0.0)
            for i in range(3)
        ]
        stamps = ["Timestamp start: 1700000000000", "Timestamp end: 1700000009000"]
        (folder / LOAD_FILE).write_text("\n".join([mcperf.HEADER, *rows, *stamps, ""]))
        job = run_report.JobOutcome(0, 0.1, 0.1, 0.1, 2.0, 0.0, 0)
        jobs_done = dict.fromkeys(scenario.job_names, job)
        cost = run_report.LoopCost(25.0, 0, 1.0, 50.0)
        outcome = run_report.Outcome("static", 3.0, jobs_done, 5, 0, cost, True)
        intervals = run_report.load_intervals(folder)
        run_report.write(folder, scenario, outcome, intervals)
        predicted.note_policy(folder, "static")
        shown = predicted.Figures(
            makespan_s=2.0,
            violation_ratio=0.1,
            intervals=9.0,
            p95_median_us=500.0,
            p95_high_us=900.0,
            shared_p95_us=None,
            apart_p95_us=500.0,
            changes_per_min=3.0,
            guard_steps=0.0,
            jobs=dict.fromkeys(scenario.job_names, 2.0),
        )
        said = predicted.Prediction(
            profile="cca-2025", measured=shown, replayed=shown, free=None, remarks=["one"]
        )
        predicted.write_prediction(folder, said)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def _rule(scenario: Scenario, folder: Path) -> None:
    make(folder / "mine.yaml").reset(scenario)


def _load(folder: Path) -> None:
    """As a report reads it, but for the row that it may wait for."""
    text = read_text(folder / LOAD_FILE, "a load's output", 1 << 20, errors="replace")
    mcperf.read_rows(text.splitlines())


def _events(folder: Path) -> None:
    read_events(folder)
    started_at_s(folder)


def _view(folder: Path) -> None:
    reader = live_view.Reader(folder)
    reader.update()
    with (folder / "shown").open("w") as out:
        Console(file=out, width=100).print(live_view.draw(reader.picture))
    read_samples(folder)


def _page(scenario: Scenario, folder: Path) -> None:
    run_report.write_page(folder, scenario, run_report.read_report(folder), "")


def _prediction(folder: Path) -> None:
    prediction = predicted.read_prediction(folder)
    if prediction is not None:
        predicted.lines_of(prediction, 1000.0)
        predicted.in_short(prediction)


def _client_files(scenario: Scenario) -> tuple[bytes, dict[str, bytes]]:
    """What mcperf prints of a load that jumps, and the files of the run that it was beside."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        targets = (90e3, 10e3, 60e3, 5e3, 100e3, 30e3)
        served = np.cumsum([0.0, *(2.0 * target for target in targets)])
        times_s = np.arange(0.0, 13.0, 0.5)
        requests = np.interp(times_s, np.arange(0.0, 13.0, 2.0), served)
        samples = dict(zip(times_s.tolist(), requests.tolist(), strict=True))
        _recorded(folder, scenario, samples).close()
        start_s = started_at_s(folder)
        ends = f"Timestamp start: {1e3 * start_s:.0f}\nTimestamp end: {1e3 * start_s + 12e3:.0f}\n"
        rows = [mcperf.HEADER]
        for number, target in enumerate(targets):
            begin_s = start_s + 2.0 * number
            rows.append(mcperf.format_row([1e2, 2e2], target, target, begin_s, begin_s + 2.0, 0.0))
        output = "\n".join([ends, *rows, ""]).encode()
        return output, {path.name: path.read_bytes() for path in folder.iterdir()}


def _joined(client: bytes, beside: Mapping[str, bytes]) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in {"mcperf.txt": client, **beside}.items():
            (folder / file).write_bytes(content)
        _join(folder)
        return (folder / CLIENT_FILE).read_bytes()


def _join(folder: Path) -> None:
    join(folder, folder / "mcperf.txt", (0.0, 13.0), 1000.0)


def _traces() -> list[bytes]:
    return [gzip.compress(_trace(entries), mtime=0) for entries in (20, 5000)]


def _trace(entries: int = 20) -> bytes:
    times_s = (f"a,{1.5 * number}" for number in range(entries))
    return "\n".join([f"job,{COLUMN}", *times_s]).encode()


def _measured_runs() -> bytes:
    """The tables of a measured run, one after another."""
    job = next(iter(JOBS))
    runs = "run,repo,date,server,valid\na-0,a/b,2025-05-01T10:00:00,n2-highmem-4,yes\n"
    intervals = "run,i,t_start_s,t_end_s,target_qps,p95_us\n" + "".join(
        f"a-0,{i},{10 * i},{10 * i + 10},{20000 * (i % 3 + 1)},400\n" for i in range(12)
    )
    events = (
        "run,t_s,event,job,cores,threads,note\na-0,0,start,memcached,0,2,\n"
        f"a-0,5,start,{job},1;2,2,\na-0,9,custom,{job},,,Job quota percentage 50\n"
        f"a-0,60,end,{job},,,\n"
    )
    return _joined_tables(runs=runs, intervals=intervals, events=events)


def _measured(folder: Path) -> None:
    _split_tables(folder, "runs.txt")
    read_runs(folder, tuple(JOBS)).summary()


def _joined_tables(**tables: str) -> bytes:
    return "".join(f"===={name}\n{table}" for name, table in tables.items()).encode()


def _split_tables(folder: Path, name: str) -> None:
    """Each table to a file of its own; one whose name is not what it was is none."""
    for path in folder.glob("*.csv"):
        path.unlink()
    for part in (folder / name).read_bytes().split(b"====")[1:]:
        called, _, table = part.partition(b"\n")
        if (name := called.decode(errors="replace")) in COLUMNS:
            (folder / f"{name}.csv").write_bytes(table)


def _published() -> bytes:
    """The tables of scans and jobs that a year's profile is fitted to and a report is made of."""
    job, loads = next(iter(JOBS)), range(10_000, 60_000, 10_000)
    head = "repo,year,interference,rep,target_qps,achieved_qps,avg_us,p50_us,p95_us,p99_us\n"
    scans = "repo,path,threads,cores,rep,target_qps,achieved_qps,p95_us,year,cpu_util_pct\n"
    for load in loads:
        scans += f"a/b,p1,2,2,0,{load},{min(load, 4e4)},{300 + load / 100},2025,{load / 600}\n"
    group = REPORT.split()[1]
    beside = "".join(f"{group},2025,cpu,0,{load},{load},200,150,400,900\n" for load in loads)
    times = (f"a/b,2025,m,{job},{threads},{60 / threads},50,1,p\n" for threads in (1, 2, 4))
    return _joined_tables(
        latency_curves=scans,
        memcached_interference=head + beside,
        job_interference=f"repo,year,job,interference,real_s\na/b,2025,{job},none,60\n"
        f"a/b,2025,{job},cpu,90\n",
        job_scaling="repo,year,machine,job,threads,real_s,user_s,sys_s,path\n" + "".join(times),
        job_pairs=f"repo,job,colocated_with(no=alone),time_s\na/b,{job},no,60\na/b,{job},x,80\n",
    )


def _concluded(folder: Path) -> None:
    _split_tables(folder, "tables.txt")
    remarks: list[Remark] = []
    read_scans(folder, 2025, remarks)
    cpu_limit(folder, 2025)
    read_scaling(folder, (2025,), remarks)
    summarise(remarks)
    published = read(folder)
    conclude(published)
    speedups(published.scaling)


def _study(folder: Path) -> None:
    plan = load_study(str(folder / "mine.yaml"))
    for quick in (False, True):
        plan.points(quick)


STUDY = "asl-2018"


def _study_runs() -> bytes:
    file = io.StringIO()
    points = load_study(STUDY).points(quick=True)
    figures = dict.fromkeys(MEASURED, 5.0)
    for number, point in enumerate((points[0], *points[:8])):
        counts = ";".join(["7"] * point.members)
        row = {**point.fields, **figures, "disturbed": 0, "gets_by_member": counts}
        if number == 0:
            file.write(",".join(row) + "\n")
        file.write(",".join(map(str, row.values())) + "\n")
    return file.getvalue().encode()


def _studied(folder: Path) -> None:
    """As a study goes on with what it finds; a line that is cut off is removed."""
    with contextlib.suppress(FileNotFoundError):
        (folder / "plan.json").unlink()
    points = load_study(STUDY).points(quick=True)
    runs = Runs(folder, {}, points)
    if runs.rows:
        averages(runs.table())


def _factorial() -> bytes:
    rows = (f"{a},{b},{3 * a + b + rep}" for a in (1, 2) for b in (1, 4) for rep in range(2))
    return "\n".join(["A,B,p95_us", *rows, ""]).encode()


def _analysed(folder: Path) -> None:
    analyse_file(folder / "runs.csv", ["A", "B"], "p95_us").checks()


def _characterised(folder: Path) -> None:
    """As a characterisation goes on with what it finds; it writes the plan anew."""
    Store(folder, PURPOSE)
