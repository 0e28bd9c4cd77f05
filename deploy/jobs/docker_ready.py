"""Whether Docker answers, asked before anything is touched."""

import contextlib

from env.errors import InputError


def require_docker(address: str) -> None:
    """
    Make sure that Docker answers; an image that it lacks fails the jobs of that image only.

    :param address: of the daemon
    :raises InputError: if it does not
    """
    import docker  # late, as it takes memory: only who runs containers needs it

    from deploy.jobs.containers import connect

    try:
        with contextlib.closing(connect(address)) as client:
            client.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise InputError(
            f"Docker at {address} cannot be reached: is it running, and are you root? "
            "--runtime process does without it"
        ) from error
