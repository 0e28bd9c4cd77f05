"""The command line of `deploy.py`."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import agents
from agents.checkpoint import find_checkpoint, shipped_for
from deploy import deployment
from deploy.linux.machine_lock import runtime_folder
from deploy.linux.service_process import OUT_OF_FILES
from deploy.linux.signals import interrupt_on_stop
from deploy.queue import queue_commands
from deploy.records.terminal import complain
from deploy.safety.guardian import Guardian
from deploy.settings import Settings
from env.errors import InputError, exit_on_bad_input, fault
from env.inputs.commandline import OneLineParser, address, whole_number
from env.scenario import load_scenario


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = OneLineParser(prog="deploy.py", description="Run a policy on this machine.")
    add = command.add_argument
    who = command.add_mutually_exclusive_group()
    who.add_argument("--checkpoint", help="a trained policy (the scenario's, else general.zip)")
    who.add_argument("--policy", help="any shipped policy, or a file with a rule's parameters")
    add("--scenario", default="cca-2025", help="a shipped scenario or a YAML file (%(default)s)")
    add_machine_options(command)
    add("--report", type=Path, default=Path("report"), help="folder of the report (%(default)s)")
    add("--no-pictures", action="store_true", help="report the run's own figures only: quicker")
    add("--view", action="store_true", help="show a live picture in place of events")
    latency = command.add_mutually_exclusive_group()
    latency.add_argument(
        "--probe", action="store_true", help="measure memcached's latency by requests of our own"
    )
    latency.add_argument(
        "--tap", action="store_true", help="measure it on the users' requests, in the kernel"
    )
    add("--metrics-port", type=whole_number(0, 65535), help="serve Prometheus on loopback")
    add("--queue", type=Path, metavar="DIR", help="run the jobs handed in there, until stopped")
    add("--leave-jobs", action="store_true", help="when interrupted, leave the jobs running")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say whether this machine is fit")
    what.add_argument("--dry-run", action="store_true", help="say what it would do, for 10 s")
    what.add_argument("--resume", action="store_true", help="go on after a loop that was killed")
    what.add_argument("--submit", type=Path, metavar="FILE", help="hand a job in to --queue")
    what.add_argument("--list", action="store_true", help="show the jobs of --queue")
    what.add_argument("--cancel", metavar="NAME", help="have a job of --queue ended")
    kube = command.add_argument_group("on a Kubernetes cluster (docs/cluster.md)").add_argument
    kube("--cluster", metavar="PLAN", help="run this plan's jobs there, not on this machine")
    kube("--cluster-scenario", metavar="FILE", help="its scenario, where that is a file")
    kube("--kubeconfig", type=Path, help="how to reach the cluster (what kubectl takes)")
    kube("--node", metavar="NAME", help="tend this machine's pods, it being that node")
    kube("--namespace", default="coretide", help="of all that is created (%(default)s)")
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
    other = "HOST:PORT of another process of a group, one option each"
    add("--member", type=address, action="append", default=[], help=other)
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
        members=tuple(arguments.member),
        **more,
    )


def main(argv: Sequence[str] | None, guardian: Guardian) -> int:
    """
    Do as the command line says.

    :param argv: command line, the process's own if none is given
    :param guardian: makes the machine safe if this process dies
    :return: the exit code
    """
    line = parser()
    arguments = line.parse_args(argv)
    asked = _asked_of_queue(arguments)
    if asked is not None and arguments.queue is None:
        line.error("--submit, --list and --cancel need --queue DIR")
    if arguments.queue is not None and arguments.cluster is not None:
        line.error("--cluster runs a plan of its own: it takes no --queue")
    if arguments.cluster is None and arguments.cluster_scenario:
        line.error("--cluster-scenario needs --cluster PLAN")
    if arguments.cluster is None and arguments.node is None and arguments.kubeconfig:
        line.error("--kubeconfig needs --cluster PLAN or --node NAME")
    if arguments.node is not None and _other_mode(arguments):
        line.error(f"--node takes no {_other_mode(arguments)}: its pods are all it tends")
    if arguments.queue is not None and arguments.dry_run:
        line.error("--dry-run: a queue is not served without being touched")
    settings = settings_of(
        arguments,
        arguments.report,
        probe=arguments.probe,
        tap=arguments.tap,
        metrics_port=arguments.metrics_port,
        illustrated=not arguments.no_pictures,
        view=arguments.view,
        leave_jobs=arguments.leave_jobs,
        resume=arguments.resume,
        dry_run=arguments.dry_run,
        queue=arguments.queue,
    )
    with exit_on_bad_input(), _told_of_files():
        if asked is not None and not arguments.restore:
            return _ended_in_order(asked)
        if arguments.cluster is not None:
            from deploy.cluster.cluster_commands import run_on_cluster  # late: few need it

            return _ended_in_order(
                lambda: run_on_cluster(arguments), "; use --resume to go on, or --restore"
            )
        if arguments.restore:
            return _ended_in_order(lambda: deployment.restore(settings), "; use --restore again")
        open_end = settings.queue is not None or arguments.node is not None
        scenario = load_scenario(arguments.scenario, jobless=open_end)
        if open_end:
            scenario = scenario.with_jobs(())
        if scenario.has_arrivals:
            raise InputError(
                f"scenario {scenario.name}: jobs: arrival_s above 0 is for the simulator only"
            )
        named = arguments.policy or arguments.checkpoint or shipped_for(scenario)
        chosen = named if arguments.policy else str(find_checkpoint(named))
        settings = replace(settings, policy=chosen)
        if arguments.check:
            from deploy.check import check

            return _ended_in_order(lambda: check(scenario, settings, guardian))
        policy = agents.make(chosen)
        agents.warn(policy, scenario)
        if arguments.node is not None:
            from deploy.node.node_commands import tend_node  # late: few need it

            node, kubeconfig = arguments.node, arguments.kubeconfig
            return tend_node(node, kubeconfig, scenario, policy, settings, guardian)
        return deployment.run(scenario, policy, settings, guardian)
    raise AssertionError("not reached")


def _other_mode(arguments: argparse.Namespace) -> str:
    """An option that says that something else is wanted than to tend a node; empty if none does."""
    given = vars(arguments)
    others = (
        "cluster",
        "queue",
        "check",
        "dry_run",
        "resume",
        "submit",
        "list",
        "cancel",
        "leave_jobs",
    )
    return next((f"--{one.replace('_', '-')}" for one in others if given[one]), "")


def _asked_of_queue(arguments: argparse.Namespace) -> Callable[[], None] | None:
    """What is asked of a queue beside its loop, if anything is."""
    if arguments.submit is not None:
        return lambda: queue_commands.submit(arguments.queue, arguments.submit)
    if arguments.list:
        return lambda: queue_commands.show(arguments.queue)
    if arguments.cancel is not None:
        return lambda: queue_commands.cancel(arguments.queue, arguments.cancel)
    return None


@contextlib.contextmanager
def _told_of_files() -> Iterator[None]:
    """Where no file can be opened any more, whatever is at it has ended as it should: one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in OUT_OF_FILES:
            raise
        raise InputError(fault(error)) from error


def _ended_in_order(command: Callable[[], int | None], advice: str = "") -> int:
    """The exit code of a command that a signal ends with one line."""
    interrupt_on_stop()
    try:
        return command() or 0
    except KeyboardInterrupt as stop:
        complain(f"stopped{advice}")
        return 128 + int(stop.args[0])
