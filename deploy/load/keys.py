"""The records that load and probe ask for, as mcperf makes them by default: 10000 of 200 bytes."""

import socket

from env.errors import InputError, os_reason

RECORDS = 10_000
KEY_BYTES = 30
VALUE_BYTES = 200

ANSWERED = b"END\r\n"
"""The last bytes of every answer to a GET, and of nothing else: values are made of zeros."""

LOAD_LIMIT_S = 10.0


def get_request(record: int) -> bytes:
    """
    A GET of one record, `REQUEST_BYTES` long.

    :param record: 0 to `RECORDS` - 1
    """
    return b"get %0*d\r\n" % (KEY_BYTES, record)


REQUEST_BYTES = len(get_request(0))


def load_records(host: str, port: int) -> None:
    """
    Store all records.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :raises InputError: if nobody answers there, or not as memcached does
    """
    value = b"0" * VALUE_BYTES
    sets = b"".join(
        b"set %0*d 0 0 %d noreply\r\n%s\r\n" % (KEY_BYTES, record, VALUE_BYTES, value)
        for record in range(RECORDS)
    )
    try:
        with socket.create_connection((host, port), LOAD_LIMIT_S) as connection:
            connection.sendall(sets + get_request(RECORDS - 1))
            answer = b""
            while not answer.endswith(ANSWERED):
                part = connection.recv(65536)
                if not part or len(answer) > 65536:
                    raise InputError(f"{host}:{port}: does not answer as memcached does")
                answer += part
    except OSError as error:
        raise InputError(
            f"{host}:{port}: memcached cannot be reached: {os_reason(error)}"
        ) from error
    if value not in answer:
        raise InputError(f"{host}:{port}: memcached did not keep the records")
