"""How a deployment has ended, for its report: figures that only the loop itself knows."""

from pathlib import Path

from deploy.loop.live_machine import LiveMachine
from deploy.records import run_report
from deploy.records.mcperf import Row
from deploy.records.terminal import complain
from env.errors import InputError, os_reason


def write_report(
    folder: Path,
    policy: str,
    machine: LiveMachine,
    restored: bool,
    stopped: bool,
    illustrated: bool,
    cpu_pct: float,
    open_end: bool = False,
) -> None:
    """
    Say what the run has come to; a full disk does not undo the run.

    A run that was stopped gets figures alone, at once: whoever stopped it waits.

    :param folder: of the run's records
    :param policy: who decided
    :param machine: on which everything has ended
    :param restored: whether it is as it was found, but for memcached's precedence, which goes last
    :param stopped: whether the run was ended before its jobs were done
    :param illustrated: whether to predict, to draw pictures and a page, which takes seconds
    :param cpu_pct: CPU use of this process while it decided [% of one vCPU]
    :param open_end: whether jobs came one by one, as from a queue
    """
    state, lasted_s = machine.actuator.state, machine.now_s
    jobs = {
        name: run_report.JobOutcome(
            record.exit_code,
            record.decided_s,
            record.start_s,
            record.begun_s,
            record.end_s,
            machine.actuator.jobs[name].paused_s(lasted_s),
            max(0, record.attempts - 1),
        )
        for name, record in state.jobs.items()
        if name in machine.actuator.jobs
    }
    cost = run_report.LoopCost(
        1e3 * machine.scenario.control.period_s,
        machine.overruns,
        cpu_pct,
        _largest_mib(),
    )
    outcome = run_report.Outcome(
        policy,
        lasted_s,
        jobs,
        machine.actuator.changes,
        machine.overruled,
        cost,
        restored,
        open_end,
    )
    intervals: list[Row] = []
    try:
        intervals = run_report.load_intervals(folder, 0.0 if stopped else outcome.window_s[1])
    except InputError as error:
        complain(f"{error}; the report does without latency")
    try:
        report = run_report.write(folder, machine.scenario, outcome, intervals)
        if illustrated and not stopped:
            run_report.illustrate(folder, machine.scenario, report)
    except (InputError, OSError) as error:
        said = os_reason(error) if isinstance(error, OSError) else error
        complain(f"{folder}: no report: {said}")


def _largest_mib() -> float:
    """The most memory this process has held; `ru_maxrss` would count whoever started it, too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
