"""The records that load and probe ask for, as mcperf makes them by default: 10000 of 200 bytes."""

import socket
from collections.abc import Iterable

from env.errors import InputError, os_reason

RECORDS = 10_000
KEY_BYTES = 30
VALUE_BYTES = 200

ANSWERED = b"END\r\n"
"""The last bytes of every answer to a GET, and of nothing else: values are made of zeros."""

LOAD_LIMIT_S = 10.0
CHUNK_BYTES, LONGEST_ANSWER = 1 << 20, 2 << 20


def get_request(record: int) -> bytes:
    """
    A GET of one record.

    :param record: 0 to `RECORDS` - 1
    """
    return b"get %0*d\r\n" % (KEY_BYTES, record)


def load_records(host: str, port: int, sizes: Iterable[int] = (VALUE_BYTES,) * RECORDS) -> None:
    """
    Store all records.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param sizes: of their values, by number [bytes]
    :raises InputError: if nobody answers there, or not as memcached does
    """
    try:
        with socket.create_connection((host, port), LOAD_LIMIT_S) as connection:
            record, waiting = -1, bytearray()
            for record, size in enumerate(sizes):
                waiting += b"set %0*d 0 0 %d noreply\r\n" % (KEY_BYTES, record, size)
                waiting += b"0" * size + b"\r\n"
                if len(waiting) > CHUNK_BYTES:
                    connection.sendall(waiting)
                    waiting.clear()
            connection.sendall(waiting + get_request(record))
            answer = b""
            while not answer.endswith(ANSWERED):
                part = connection.recv(65536)
                if not part or len(answer) > LONGEST_ANSWER:
                    raise InputError(f"{host}:{port}: does not answer as memcached does")
                answer += part
    except OSError as error:
        raise InputError(
            f"{host}:{port}: memcached cannot be reached: {os_reason(error)}"
        ) from error
    if not answer.startswith(b"VALUE "):
        raise InputError(f"{host}:{port}: memcached did not keep the records")
