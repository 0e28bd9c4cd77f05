"""The command line of `deploy.py`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import agents
from agents.checkpoint import find_checkpoint
from deploy import deployment
from deploy.linux.machine_lock import runtime_folder
from deploy.linux.signals import interrupt_on_stop
from deploy.records.terminal import complain
from deploy.safety.guardian import Guardian
from deploy.settings import Settings
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, address, whole_number
from env.scenario import load_scenario


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = OneLineParser(prog="deploy.py", description="Run a policy on this machine.")
    add = command.add_argument
    who = command.add_mutually_exclusive_group()
    who.add_argument("--checkpoint", default="best.zip", help="a trained policy (%(default)s)")
    who.add_argument("--policy", help="any shipped policy, or a file with a rule's parameters")
    add("--scenario", default="cca-2025", help="a shipped scenario or a YAML file (%(default)s)")
    add_machine_options(command)
    add("--report", type=Path, default=Path("report"), help="folder of the report (%(default)s)")
    add("--no-pictures", action="store_true", help="report the run's own figures only: quicker")
    add("--view", action="store_true", help="show a live picture in place of events")
    add("--probe", action="store_true", help="measure memcached's latency from this machine")
    add("--metrics-port", type=whole_number(0, 65535), help="serve Prometheus on loopback")
    add("--leave-jobs", action="store_true", help="when interrupted, leave the jobs running")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say whether this machine is fit")
    what.add_argument("--dry-run", action="store_true", help="say what it would do, for 10 s")
    what.add_argument("--resume", action="store_true", help="go on after a loop that was killed")
    # Not exclusive: the service gives it after the options that it ran with, whatever they are.
    add("--restore", action="store_true", help="only undo what a killed loop has left")
    return command


def add_machine_options(command: argparse._ActionsContainer) -> None:
    """
    Add the options that say where memcached is and who runs the jobs.

    :param command: a command line, or a group of its options
    """
    add = command.add_argument
    add("--memcached", type=address, default="127.0.0.1:11211", help="HOST:PORT (%(default)s)")
    add("--runtime", choices=["docker", "process"], default="docker", help="who runs the jobs")
    add("--docker", help="unix:///PATH of Docker (DOCKER_HOST, or Docker's own default)")
    add("--allow-privileged", action="store_true", help="give containers Docker's default rights")
    add("--state", type=Path, default=runtime_folder(), help="folder of the state (%(default)s)")


def settings_of(arguments: argparse.Namespace, report: Path, **more: Any) -> Settings:
    """
    The settings that a command line with `add_machine_options` asks for.

    :param arguments: what it read
    :param report: folder of the records
    :param more: further settings
    """
    host, port = arguments.memcached
    return Settings(
        host=host,
        port=port,
        runtime=arguments.runtime,
        docker=arguments.docker,
        privileged=arguments.allow_privileged,
        folder=arguments.state,
        report=report,
        **more,
    )


def main(argv: Sequence[str] | None, guardian: Guardian) -> int:
    """
    Do as the command line says.

    :param argv: command line, the process's own if none is given
    :param guardian: makes the machine safe if this process dies
    :return: the exit code
    """
    arguments = parser().parse_args(argv)
    settings = settings_of(
        arguments,
        arguments.report,
        policy=arguments.policy or str(find_checkpoint(arguments.checkpoint)),
        probe=arguments.probe,
        metrics_port=arguments.metrics_port,
        illustrated=not arguments.no_pictures,
        view=arguments.view,
        leave_jobs=arguments.leave_jobs,
        resume=arguments.resume,
        dry_run=arguments.dry_run,
    )
    with exit_on_bad_input():
        if arguments.restore:
            return _ended_in_order(lambda: deployment.restore(settings), "; use --restore again")
        scenario = load_scenario(arguments.scenario)
        if scenario.has_arrivals:
            raise InputError(
                f"scenario {scenario.name}: jobs: arrival_s above 0 is for the simulator only"
            )
        if arguments.check:
            from deploy.check import check

            return _ended_in_order(lambda: check(scenario, settings, guardian))
        policy = agents.make(arguments.policy or arguments.checkpoint)
        agents.warn(policy, scenario)
        return deployment.run(scenario, policy, settings, guardian)
    raise AssertionError("not reached")


def _ended_in_order(command: Callable[[], int], advice: str = "") -> int:
    """The exit code of a command that a signal ends with one line."""
    interrupt_on_stop()
    try:
        return command()
    except KeyboardInterrupt as stop:
        complain(f"stopped{advice}")
        return 128 + int(stop.args[0])
