"""How a deployment has ended, for its report: figures that only the loop itself knows."""

import resource
import sys
from pathlib import Path

from deploy import report
from deploy.machine import LiveMachine


def write_report(
    folder: Path, policy: str, machine: LiveMachine, restored: bool, illustrated: bool
) -> None:
    """
    Say what the run has come to; a full disk does not undo the run.

    :param folder: of the run's records
    :param policy: who decided
    :param machine: on which everything has ended
    :param restored: whether it is as it was found
    :param illustrated: whether to draw pictures and a page
    """
    state, lasted_s = machine.actuator.state, machine.now_s
    jobs = {
        name: report.JobOutcome(
            record.exit_code, record.start_s, record.end_s, record.paused_s, record.failures
        )
        for name, record in state.jobs.items()
    }
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cost = report.Loop(
        1e3 * machine.scenario.control.period_s,
        machine.overruns,
        100.0 * (usage.ru_utime + usage.ru_stime) / max(lasted_s, 1e-9),
        usage.ru_maxrss / 1024,
    )
    outcome = report.Outcome(
        policy, jobs, machine.actuator.changes, machine.overruled, cost, restored
    )
    try:
        intervals = report.load_intervals(folder, outcome.window_s[1])
        report.write(folder, machine.scenario, outcome, intervals, illustrated)
    except OSError as error:
        print(f"coretide: {folder}: no report: {error}", file=sys.stderr)
