"""
bpftrace with the program that follows memcached's requests: what it takes, and how it is started.

It runs as root, so nothing of it comes from outside: the program is `requests.bt` beside this file,
and only whole numbers are filled in. The kernel ends it with the loop, however that ends, and takes
its probes away with it.

    python -m deploy.tap.tracer EVERY LATE_NS NETWORK:PORT [NETWORK:PORT ...]
"""

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, whole_number

PROGRAM = Path(__file__).with_name("requests.bt")

TRACING = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
TRACEPOINTS = ("sk_data_ready", "sock_recv_length", "sock_send_length")
"""Of the kernel's group `sock`; from 6.3 on."""

LOCKDOWN, BTF = Path("/sys/kernel/security/lockdown"), Path("/sys/kernel/btf/vmlinux")

PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h."""


def why_not() -> str:
    """Why this machine cannot run it; empty if nothing is known to be in the way."""
    if os.geteuid() != 0:
        return "it takes root"
    if shutil.which("bpftrace") is None:
        return "bpftrace: not found; install it: apt-get install bpftrace"
    if LOCKDOWN.exists() and "[confidentiality]" in LOCKDOWN.read_text(encoding="utf-8"):
        return "the kernel is locked down: confidentiality"
    if not BTF.exists():
        return f"kernel {os.uname().release} does not describe its types: it has no {BTF}"
    events = [folder / "events" for folder in TRACING if (folder / "events").is_dir()]
    if not events:
        return f"tracefs is not mounted: mount -t tracefs nodev {TRACING[0]}"
    missing = [name for name in TRACEPOINTS if not (events[0] / "sock" / name).exists()]
    if missing:
        return f"kernel {os.uname().release} has no tracepoint sock:{missing[0]}"
    return ""


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(prog="python -m deploy.tap.tracer")
    line.add_argument("every", type=whole_number(1), help="one request in so many is followed")
    line.add_argument("late_ns", type=whole_number(1), help="what takes longer is late [ns]")
    line.add_argument(
        "at", type=_socket, nargs="+", help="inode of a process's network, and its TCP port"
    )
    return line


def _socket(text: str) -> tuple[int, int]:
    network, _, port = text.partition(":")
    return whole_number(1)(network), whole_number(1, 65535)(port)


def main(argv: Sequence[str] | None = None) -> None:
    """
    Become bpftrace.

    :param argv: command line, the process's own if none is given
    """
    given = parser().parse_args(argv)
    with exit_on_bad_input():
        if reason := why_not():
            raise InputError(f"latency tap: {reason}")
        program = shutil.which("bpftrace") or ""
        # Python ignores SIGPIPE, and a program that it becomes would, too.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        numbered = "".join(
            f"@process_at[(uint64){network}, (uint64){port}] = (uint64){number}; "
            for number, (network, port) in enumerate(given.at, 1)
        )
        text = f"{PROGRAM.read_text(encoding='utf-8')}\nBEGIN {{ {numbered}}}"
        options = ["-q", "-f", "json", "-B", "line", "-e", text]
        numbers = map(str, (given.every, given.late_ns, len(given.at)))
        os.execve(program, [program, *options, *numbers], {"PATH": os.defpath})


if __name__ == "__main__":
    main(sys.argv[1:])
