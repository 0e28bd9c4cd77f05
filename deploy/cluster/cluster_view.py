"""What somebody watching a run on a cluster sees: a table that changes, or lines where none can."""

import contextlib
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from deploy.cluster.placement_run import PlacementRun
from deploy.records.recorder import Event
from deploy.records.terminal import printable, say


def event_line(event: Event) -> str:
    """
    An event in words.

    :param event: what happened
    """
    said = {"start": "started", "end": "done"}.get(event.what, event.detail)
    where = f" on vCPUs {','.join(map(str, event.cores))}" if event.cores else ""
    return f"{event.time_s:8.1f} s  {event.job}: {said}{where}"


def jobs_table(run: PlacementRun) -> Table:
    """
    Where every job of a plan stands.

    :param run: the run
    """
    table = Table(box=box.SIMPLE_HEAD, title=f"{run.plan.name} in namespace {run.namespace}")
    for column in ("job", "node", "vCPUs", "after", "attempt", "state"):
        table.add_column(column)
    for place in run.plan.jobs:
        tries = run.attempts.get(place.name, [])
        last = tries[-1] if tries else None
        state = f"{last.state} {last.why}".strip() if last else "not started"
        table.add_row(
            place.name,
            place.node,
            ",".join(map(str, place.vcpus)),
            ", ".join(place.after),
            str(last.number) if last else "",
            printable(state),
        )
    return table


@contextlib.contextmanager
def shown(run: PlacementRun) -> Iterator[list[Event]]:
    """
    Show a run while the block lasts; the list receives its events.

    :param run: the run, which has not begun
    """
    events: list[Event] = []
    console = Console()
    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            live = Live(get_renderable=lambda: jobs_table(run), console=console)
            stack.enter_context(live)

        def tell(event: Event) -> None:
            events.append(event)
            if console.is_terminal:
                console.print(printable(event_line(event)), markup=False)
            else:
                say(event_line(event))

        run.listen(tell)
        yield events
