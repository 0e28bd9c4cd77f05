"""Whether Docker can run a scenario's jobs, asked before anything is touched."""

import contextlib

from env.errors import InputError
from env.scenario import Scenario


def require_docker(address: str, scenario: Scenario) -> None:
    """
    Make sure that Docker answers and has the jobs' images.

    :param address: of the daemon
    :param scenario: the problem
    :raises InputError: if it does not
    """
    import docker  # late, as it takes memory: only who runs containers needs it

    from deploy.jobs.containers import connect

    try:
        with contextlib.closing(connect(address)) as client:
            client.ping()
            wanted = sorted({job.image for job in scenario.jobs})
            missing = [one for one in wanted if not (one and client.images.list(name=one))]
    except (docker.errors.DockerException, OSError) as error:
        raise InputError(
            f"Docker at {address} cannot be reached: is it running, and are you root? "
            "--runtime process does without it"
        ) from error
    if missing:
        raise InputError(
            f"Docker at {address} lacks the images of scenario {scenario.name}: "
            + ", ".join(image or "none is named" for image in missing)
        )
