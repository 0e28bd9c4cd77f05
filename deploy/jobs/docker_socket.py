"""Docker's daemon at its socket, asked without its SDK, which takes a quarter of the start."""

import socket

CALL_LIMIT_S = 10
"""How long a daemon that listens may take to answer a call [s]; one that is busy takes seconds."""

LONGEST_ANSWER = 8192
"""More than a daemon says to `QUESTION`, which is 0.3 KiB [bytes]."""

QUESTION = b"GET /_ping HTTP/1.0\r\n\r\n"


def ping(address: str) -> str:
    """
    Make sure that a Docker daemon answers.

    :param address: `unix:///PATH`
    :return: what it says that it is, such as `Docker/26.1.5 (linux)`
    :raises OSError: if it cannot be reached, or takes too long
    :raises ValueError: if whoever answers there is no Docker
    """
    with _connected(address) as connection:
        connection.sendall(QUESTION)
        answer = b""
        while len(answer) < LONGEST_ANSWER and (part := connection.recv(LONGEST_ANSWER)):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    if body.strip() != b"OK":
        raise ValueError("it does not answer as Docker does")
    names = (line.partition(b":") for line in head.splitlines()[1:])
    server = {name.strip().lower(): value.strip() for name, _, value in names}.get(b"server", b"")
    return server.decode(errors="replace") or "Docker"


def listens(address: str) -> bool:
    """
    Whether there is a daemon at an address, be it one that does not answer.

    :param address: `unix:///PATH`
    """
    try:
        _connected(address).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(CALL_LIMIT_S)
        connection.connect(address.removeprefix("unix://"))
    except OSError:
        connection.close()
        raise
    return connection
