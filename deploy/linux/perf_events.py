"""
The perf events of a program that traces the kernel, which are sampled although nobody reads them.

bpftrace attaches a BPF program to a tracepoint through a perf event of vCPU 0. The program runs on
all vCPUs, and tells the kernel to go on with the event: on vCPU 0 the kernel then samples every
hit, although the event has no buffer, and interrupts itself to wake a reader, although there is
none. Disabling the event ends the sampling and leaves the program running (Linux,
kernel/events/core.c: `perf_trace_run_bpf_submit`).
"""

import contextlib
import ctypes
import fcntl
import os
from pathlib import Path

PIDFD_GETFD = 438
"""The system call's number on every architecture of ours; from Linux 5.6 on."""

DISABLE, QUERY_BPF = 0x2401, 0xC008240A
"""PERF_EVENT_IOC_DISABLE and PERF_EVENT_IOC_QUERY_BPF, from Linux's perf_event.h."""


def stop_sampling(pid: int) -> int:
    """
    Disable the perf events by which a process has BPF programs at tracepoints.

    :param pid: a child of this process
    :return: how many there were
    :raises OSError: if the process is gone, or the kernel does not let its files be had
    """
    disabled = 0
    with contextlib.ExitStack() as stack:
        process = os.pidfd_open(pid)
        stack.callback(os.close, process)
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if str(file.readlink()) == "anon_inode:[perf_event]":
                event = file_of(process, int(file.name))
                stack.callback(os.close, event)
                disabled += _disable_tracepoint(event)
    return disabled


def file_of(process: int, number: int) -> int:
    """
    An open file of a process as one of ours.

    :param process: a pidfd of it
    :param number: the file's there
    :return: the file's here
    :raises OSError: if it cannot be had
    """
    kernel = ctypes.CDLL(None, use_errno=True)
    file = int(kernel.syscall(PIDFD_GETFD, process, number, 0))
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return file


def _disable_tracepoint(event: int) -> bool:
    """Disable an event if it is a tracepoint's: a timer's or a buffer's has no list of programs."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(event, QUERY_BPF, bytes(8))
        fcntl.ioctl(event, DISABLE, 0)
        return True
    return False
