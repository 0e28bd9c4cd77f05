"""
The local scenario on this machine, twice: under the trained policy, then under a published rule.

    make demo

Installs what is missing (Debian, Ubuntu), compiles the simulator, measures the machine, starts a
memcached and, if there is no Docker daemon, one on a private socket, and prints both runs side by
side, and each beside what was predicted of it. Then the first run corrects the profile, and what
is predicted of it now is printed, too. Afterwards nothing of it runs any more. Everything measured
stays in `demo/`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from agents.checkpoint import shipped_for
from deploy.engines import memcached
from deploy.engines.images import docker_daemon
from deploy.group.group import serving
from deploy.linux.helpers import helper_command
from deploy.linux.signals import held, interrupt_on_stop
from deploy.records.predicted import lines_of, read_prediction
from deploy.records.recorder import LOAD_FILE, PAGE_FILE, REPORT_FILE
from deploy.records.run_report import read_report
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser
from env.scenario import Scenario, load_scenario

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "deploy.py"
FOLDER = Path("demo")
RULE = Path("agents/parameters/local/threshold-groups.yaml")
PROBE = "--probe"
TRACE_SEED = 2333
PACKAGES = {
    "memcached": "memcached",
    "dockerd": "docker.io",
    "stress-ng": "stress-ng",
    "busybox": "busybox-static",
}
INSTALL_LIMIT_S = 600.0
COMPILE_S, MEASURE_S, PREPARE_S = 60.0, 180.0, 15.0
RUN_S = (115.0, 170.0)
"""Under the trained policy, and under the rule, with the jobs' making and all that ends a run."""

END_S = 15.0
"""What a deployment that is told to stop has to put the machine right."""

DRAW_S = 10.0
"""What its pictures take."""

REFINE_S = 60.0
"""What a run takes to correct the profile."""


@dataclass
class Budget:
    """Says how long each step may take, and how long it took."""

    console: Console
    started_s: float = field(default_factory=time.monotonic)

    @contextlib.contextmanager
    def step(self, what: str, limit_s: float) -> Iterator[None]:
        """
        Announce a step and time it.

        :param what: the step, in words
        :param limit_s: the step's budget [s]
        """
        self.console.print(f"{what} (up to {limit_s:.0f} s) ...", highlight=False)
        begun_s = time.monotonic()
        yield
        took_s = time.monotonic() - begun_s
        over = "" if took_s <= limit_s else ", over its budget"
        self.console.print(f"    took {took_s:.0f} s{over}", highlight=False)


def install_missing(budget: Budget) -> None:
    """
    Install the programs that are not there.

    :param budget: says what is done, and how long it took
    :raises InputError: if that is not possible
    """
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise InputError(f"please install {', '.join(missing)}; there is no apt-get here")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with budget.step(f"installing {', '.join(missing)}", INSTALL_LIMIT_S):
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            result = subprocess.run(
                ["apt-get", "--quiet=2", *command],
                env=environment,
                timeout=INSTALL_LIMIT_S,
                check=False,
            )
            if result.returncode:
                raise InputError(f"apt-get {command[0]} failed; its message is above")


def compile_kernels(budget: Budget) -> None:
    """
    Compile the simulator for whoever runs this, or measuring would have to wait for it.

    :param budget: says what is done, and how long it took
    :raises InputError: if that fails
    """
    with (
        budget.step("compiling the simulator, once after an update", COMPILE_S),
        child(helper_command("training.refinement.kernels")) as process,
    ):
        if process.wait():
            raise InputError("the simulator cannot be compiled; the reason is above")


def measure(budget: Budget) -> str:
    """
    Measure this machine.

    :param budget: says what is done, and how long it took
    :return: a scenario file: the local scenario with a load and an SLO that suit this machine; the
        local scenario's name where the measurement failed
    """
    out = FOLDER / "machine"
    shutil.rmtree(out, ignore_errors=True)  # this machine, as it is now
    with budget.step("measuring this machine", MEASURE_S):
        options = ["--scenario", "local", "--quick", "--out", str(out.resolve())]
        with child(helper_command("training.characterise", *options)) as process:
            failed = process.wait() != 0
    if failed:
        budget.console.print(
            "The machine could not be measured: the figures below are for the load and the SLO "
            "of another one.",
            style="red",
        )
        return "local"
    return str(out / "scenario.yaml")


def deploy(
    policy: str, problem: str, url: str, folder: Path, limit_s: float, sensor: str = PROBE
) -> None:
    """
    One run, whose pictures are drawn without the load, which takes a third of the time.

    :param policy: who decides
    :param problem: the scenario's name or file
    :param url: the Docker daemon's address
    :param folder: folder of the run's report
    :param limit_s: how long it may take [s]
    :param sensor: the option of `deploy.py` that says who measures latency
    :raises InputError: if the run left no report
    """
    run_under_load(policy, problem, ["--docker", url], folder, limit_s - DRAW_S, sensor)
    draw = helper_command("deploy.report", str(folder.resolve()))
    with child(draw, stdout=subprocess.DEVNULL) as drawing:
        drawing.wait()


def run_under_load(
    policy: str,
    problem: str,
    runtime: Sequence[str],
    folder: Path,
    limit_s: float,
    sensor: str = PROBE,
) -> None:
    """
    A fresh memcached or group under load, and a deployment until all jobs or the time have ended.

    :param policy: who decides
    :param problem: the scenario's name or file
    :param runtime: options of `deploy.py` that say who runs the jobs
    :param folder: folder of the run's report, which has no pictures
    :param limit_s: how long it may take [s]
    :param sensor: the option of `deploy.py` that says who measures latency
    :raises InputError: if the run left no report
    """
    scenario = load_scenario(problem)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory(prefix="coretide-") as state,
        serving(scenario.service) as servers,
        loaded(servers[0], scenario, folder / LOAD_FILE),
        (folder / "deploy.txt").open("w") as said,
    ):
        chosen = "--checkpoint" if policy.endswith(".zip") else "--policy"
        command = [sys.executable, str(SCRIPT), chosen, policy, "--scenario", problem]
        addresses = [f"{server.host}:{server.port}" for server in servers]
        command += ["--memcached", addresses[0], *runtime]
        command += [word for other in addresses[1:] for word in ("--member", other)]
        command += ["--state", state, "--report", str(folder), "--no-pictures", sensor]
        restore = [sys.executable, str(SCRIPT), "--restore", "--state", state]
        with (
            child(command, restore, stdout=said, stderr=subprocess.STDOUT) as process,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            process.wait(limit_s - END_S)
    if not (folder / REPORT_FILE).exists():
        raise InputError(f"no report of the run under {policy}: {folder}/deploy.txt has the reason")


@contextlib.contextmanager
def child(
    command: list[str], restore: list[str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """
    A program that has ended when the `with` block has, whatever ends that.

    :param command: the program and its arguments
    :param restore: what is run after it if it has to be killed
    :param options: of `subprocess.Popen`
    """
    with contextlib.ExitStack() as stack:
        with held():  # what is started is known before anything may end this program
            process = stack.enter_context(subprocess.Popen(command, **options))
            stack.callback(_give_up, process, restore)
        yield process


def _give_up(process: subprocess.Popen[bytes], restore: list[str] | None) -> None:
    """Have the machine put right, by the program itself or after its end."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        if restore is not None:
            subprocess.run(restore, check=False)


@contextlib.contextmanager
def loaded(server: memcached.Memcached, scenario: Scenario, output: Path) -> Iterator[None]:
    """
    Keep memcached under the scenario's load for the length of a `with` block.

    :param server: a running one
    :param scenario: gives the load
    :param output: folder of what the load measures
    """
    load = scenario.load
    options = ["--memcached", f"{server.host}:{server.port}"]
    options += ["--trace-seed", str(TRACE_SEED), "--interval", str(load.interval_s)]
    options += ["--qps-min", str(load.qps_min), "--qps-max", str(load.qps_max)]
    options += ["--duration", str(load.duration_s)]
    command = helper_command("deploy.load", *options)
    with output.open("w") as text, child(command, stdout=text, stderr=subprocess.PIPE) as process:
        while "#type" not in output.read_text(encoding="utf-8"):
            if process.poll() is not None:
                said = process.stderr.read().decode() if process.stderr else ""
                raise InputError(f"the load could not start: {said.strip()}")
            time.sleep(0.02)
        yield


def side_by_side(reports: list[dict[str, Any]], scenario: Scenario) -> Table:
    """
    Both runs as a table.

    :param reports: of finished runs
    :param scenario: gives SLO and jobs
    """
    view = Table(box=box.SIMPLE_HEAD, title=f"MEASURED on this machine: {scenario.name}")
    view.add_column("")
    for report in reports:
        view.add_column(report["policy"], justify="right")
    view.add_row("makespan, s", *(_makespan(report["makespan_s"]) for report in reports))
    slo = f"intervals above {scenario.service.slo_us:g} µs"
    view.add_row(slo, *(_violations(report) for report in reports))
    view.add_row("intervals spoiled", *(str(sum(report["spoiled"])) for report in reports))
    view.add_row("median p95, µs", *(_median(report["p95_us"]) for report in reports))
    view.add_row("changes", *(str(report["actuations"]) for report in reports))
    view.add_row("SLO guard", *(_guard(report["guard"]) for report in reports))
    loops = (f"{report['loop']['cpu_pct']:.1f} %" for report in reports)
    view.add_row("loop's CPU", *loops)
    for name in scenario.job_names:
        view.add_row(f"{name}, s", *(_job(report["jobs"].get(name)) for report in reports))
    return view


def _makespan(makespan_s: float | None) -> str:
    return "not done" if makespan_s is None else f"{makespan_s:.1f}"


def _violations(report: dict[str, Any]) -> str:
    ratio = report["violation_ratio"]
    return "not measured" if ratio is None else f"{100 * ratio:.1f} % of {len(report['p95_us'])}"


def _guard(guard: dict[str, Any]) -> str:
    return f"{guard['steps']} steps, {100 * guard['share_of_time']:.1f} % of the time"


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.0f}" if values else "not measured"


def _job(job: dict[str, Any] | None) -> str:
    if job is None or job["start_s"] is None or job["end_s"] is None:
        return "not done"
    failed = "" if job["exit_code"] == 0 else f" (exit {job['exit_code']})"
    return f"{job['start_s']:.1f} to {job['end_s']:.1f}{failed}"


def foretold(folder: Path, scenario: Scenario) -> list[str]:
    """
    What the machine's profile had made of a run, beside what was measured, as lines.

    :param folder: of the run's report
    :param scenario: gives the SLO
    :raises InputError: if what is there of a prediction cannot be read
    """
    prediction = read_prediction(folder)
    return [] if prediction is None else lines_of(prediction, scenario.service.slo_us)


def refine(budget: Budget, problem: str, folder: Path) -> None:
    """
    Have a run correct the profile.

    :param budget: says what is done, and how long it took
    :param problem: the scenario's file, beside the profile that was measured
    :param folder: of the run's report
    """
    profile = Path(problem).parent / "profile.yaml"
    places = {"--report": folder, "--profile": profile, "--out": profile.with_stem("refined")}
    options = [word for name, path in places.items() for word in (name, str(path.resolve()))]
    with (
        budget.step("correcting the profile by the first run", REFINE_S),
        child(helper_command("training.refine", *options)) as process,
    ):
        failed = process.wait() != 0
    if failed:
        budget.console.print("Nothing was corrected; the reason is above.", style="red")


def hand_over(folder: Path) -> None:
    """
    Give what root has left in somebody's folder to the folder's owner.

    :param folder: with everything below it; links are not followed
    """
    owner = folder.stat()
    if owner.st_uid == 0:
        return
    for _, folders, files, here in os.fwalk(folder):
        for name in (*folders, *files):
            found = os.stat(name, dir_fd=here, follow_symlinks=False)
            elsewhere = stat.S_ISREG(found.st_mode) and found.st_nlink > 1
            if found.st_uid == 0 and not elsewhere:
                os.chown(name, owner.st_uid, owner.st_gid, dir_fd=here, follow_symlinks=False)


def main(argv: Sequence[str] | None = None) -> None:
    """
    Measure, run twice, compare.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(prog="python -m deploy.demo", description=__doc__.splitlines()[1])
    line.parse_args(argv)
    interrupt_on_stop()
    console = Console()
    budget = Budget(console)
    with (
        exit_on_bad_input(),
        contextlib.suppress(KeyboardInterrupt),
        contextlib.ExitStack() as after,
    ):
        if os.geteuid() != 0:
            raise InputError("containers need root: sudo make demo")
        after.callback(hand_over, ROOT)
        FOLDER.mkdir(exist_ok=True)
        install_missing(budget)
        compile_kernels(budget)
        budget.started_s = time.monotonic()
        problem = measure(budget)
        scenario = load_scenario(problem)
        policies = [shipped_for(scenario), str(RULE)]
        folders = [FOLDER / Path(policy).stem for policy in policies]
        with contextlib.ExitStack() as stack:
            with budget.step("starting Docker", PREPARE_S):
                url = stack.enter_context(docker_daemon())
            for policy, folder, limit_s in zip(policies, folders, RUN_S, strict=True):
                with budget.step(f"running under {policy}", limit_s):
                    deploy(policy, problem, url, folder, limit_s)
        console.print(side_by_side([read_report(folder) for folder in folders], scenario))
        for folder in folders:
            console.print(folder / PAGE_FILE, highlight=False)
            for row in foretold(folder, scenario):
                console.print(row, highlight=False, markup=False, soft_wrap=True)
        if problem != "local":
            refine(budget, problem, folders[0])
        took_s = time.monotonic() - budget.started_s
        console.print(f"{took_s / 60:.1f} minutes after installation", highlight=False)


if __name__ == "__main__":
    main()
