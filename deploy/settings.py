"""What the command line decides about a deployment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """
    What the command line decides.

    :param host: memcached's address, a name or an IP address; of a group the one that clients ask
    :param port: memcached's TCP port
    :param runtime: docker or process
    :param docker: the Docker daemon's address; None takes the environment's own
    :param privileged: whether containers get Docker's default rights
    :param folder: folder of the state
    :param report: folder of the records; those of a dry run are thrown away
    :param policy: who decides, as `agents.make` takes it; empty where it is somebody outside
    :param probe: whether memcached's latency is measured from this machine
    :param tap: whether it is measured by the tap in the probe's place
    :param metrics_port: loopback TCP port for Prometheus; None without metrics
    :param illustrated: whether the report has pictures, a page and what was predicted
    :param view: whether a live picture takes the place of the printed events
    :param leave_jobs: whether an interrupted deployment leaves its jobs running
    :param resume: whether to go on from what an earlier loop left
    :param dry_run: whether nothing may be touched
    :param queue: folder that brings the jobs; None where the scenario has them
    :param members: addresses of the other processes of a group
    :param inside: lists the processes of the pod that memcached is in, which it calls by numbers of
        their own; None where it is in none
    """

    host: str
    port: int
    runtime: str
    docker: str | None
    privileged: bool
    folder: Path
    report: Path
    policy: str = ""
    probe: bool = False
    tap: bool = False
    metrics_port: int | None = None
    illustrated: bool = True
    view: bool = False
    leave_jobs: bool = False
    resume: bool = False
    dry_run: bool = False
    queue: Path | None = None
    members: tuple[tuple[str, int], ...] = ()
    inside: Callable[[], Sequence[int]] | None = None

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Those of all of memcached's processes, the one that clients ask first."""
        return ((self.host, self.port), *self.members)
