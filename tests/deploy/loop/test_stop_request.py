"""What asks a deployment to end."""

import signal

import pytest

from deploy.loop.loop import StopRequest


@pytest.fixture
def before():
    """What SIGHUP did before, and does afterwards."""
    handler = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, handler)


def test_the_end_of_the_terminal_ends_the_run_in_good_order(before):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
    assert stop.number == signal.SIGHUP


def test_but_not_under_nohup(before):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
    assert stop.number == 0
