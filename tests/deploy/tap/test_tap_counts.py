"""What the tap makes of bpftrace's lines, and when it says that it cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.requirements import FAULT, OK, WARNING, latency_tap
from deploy.settings import Settings
from deploy.tap import tracer
from deploy.tap.latency_tap import Reading, TapCounts, shown, slot_times_s

LIMIT_S = 1e-3


def row(
    time_s: float,
    answered: int = 0,
    late: int = 0,
    asked_s: float = 0.0,
    read_s: float = 0.0,
    process: int = 1,
) -> bytes:
    """The row that bpftrace prints every 25 ms for each process."""
    words = " ".join(str(round(1e9 * moment_s)) for moment_s in (asked_s, read_s))
    words = f"{process} {round(1e9 * time_s)} {answered} {late} {words}"
    return json.dumps({"type": "printf", "data": words}).encode()


def table(name: str, entries: dict[str, int]) -> bytes:
    """A map as bpftrace prints it."""
    return json.dumps({"type": "map", "data": {name: entries}}).encode()


COUNTED = json.dumps({"type": "printf", "data": "counted"}).encode()
"""The line that follows the maps."""


def take(counts: TapCounts, *lines: bytes) -> list[Reading]:
    readings = (counts.take(line) for line in lines)
    return [reading for reading in readings if reading is not None]


@pytest.mark.parametrize("time_s", [1e-6, 15e-6, 16.5e-6, 90e-6, 1.01e-3, 0.0371, 2.5])
def test_a_slot_stands_for_its_times_to_three_percent(time_s: float) -> None:
    mantissa, exponent = int(time_s * 1e9) >> 9, 0
    while mantissa >= 32:  # as `requests.bt` does
        mantissa, exponent = mantissa >> 1, exponent + 32
    assert slot_times_s()[exponent + mantissa] == pytest.approx(time_s, rel=0.033, abs=257e-9)


def test_readings_are_what_the_maps_have_grown_by() -> None:
    counts = TapCounts()
    empty, first, second = take(
        counts,
        *(row(9.9), COUNTED),  # maps without an entry are not printed
        row(10.0),
        *(table("@wait", {"10": 3}), table("@service", {"4": 3}), table("@latency", {"14": 3})),
        COUNTED,
        row(10.1),
        *(table("@wait", {"10": 4, "90": 1}), table("@service", {"4": 5})),
        *(table("@latency", {"14": 4, "91": 1}), COUNTED),
    )
    assert (empty.time_s, first.time_s, second.time_s) == pytest.approx((9.9, 10.0, 10.1))
    assert (empty.latency.sum(), first.latency.sum(), second.latency.sum()) == (0, 3, 2)
    seen = shown([second])
    assert seen is not None and seen.count == 2
    times_us = 1e6 * slot_times_s()
    assert (seen.p50_us, seen.p95_us) == (times_us[14], times_us[91])
    assert (seen.wait_us, seen.service_us) == (times_us[90], times_us[4])
    assert shown([]) is None


def by_process(*slots: int) -> dict[str, int]:
    """One request of each process, in these slots."""
    return {str(768 * place + slot): 1 for place, slot in enumerate(slots)}


@pytest.mark.parametrize("proxied", [True, False])
def test_members_are_told_apart_and_clients_see_whom_they_ask(proxied: bool) -> None:
    counts = TapCounts(3, proxied)
    tables = (
        table("@wait", by_process(20, 6, 7)),
        table("@service", by_process(40, 8, 9)),
        table("@latency", by_process(60, 14, 16)),
    )
    (reading,) = take(counts, row(1.0), *tables, COUNTED)
    seen = shown([reading], proxied)
    times_us = 1e6 * slot_times_s()
    each = [(times_us[20], times_us[40]), (times_us[6], times_us[8]), (times_us[7], times_us[9])]
    assert seen is not None and list(seen.members) == each[proxied:]
    assert (seen.wait_us, seen.service_us) == each[0], "the slowest of all, or the proxy"
    assert (seen.count, seen.p50_us) == ((1, times_us[60]) if proxied else (3, times_us[16]))

    # One member serves, the other one stands still: a client of the proxy is not asked to wait.
    take(counts, *(row(2.0, process=process) for process in (1, 2, 3)))
    counts.late_lately(LIMIT_S)
    take(counts, row(2.1, 5, 1), row(2.1, asked_s=2.0, process=2), row(2.1, 3, 3, process=3))
    assert counts.late_lately(LIMIT_S) == ((5, 1) if proxied else (9, 5))


def test_a_silent_member_has_no_stages() -> None:
    (reading,) = take(
        TapCounts(2),
        *(table(name, {"5": 1}) for name in ("@wait", "@service", "@latency")),
        *(row(1.0), COUNTED),
    )
    seen = shown([reading])
    assert seen is not None and [stages is None for stages in seen.members] == [False, True]


def test_late_requests_are_counted_since_the_last_question() -> None:
    counts = TapCounts()
    take(counts, row(1.0, 40, 2))
    assert counts.late_lately(LIMIT_S) == (40, 2)
    take(counts, row(1.025, 60, 2))
    assert counts.late_lately(LIMIT_S) == (20, 0)


def test_where_nobody_asks_nobody_is_late() -> None:
    counts = TapCounts()
    take(counts, row(1.0, 40, 40))
    counts.late_lately(LIMIT_S)
    take(counts, row(1.025, 40, 40))
    assert counts.late_lately(LIMIT_S) == (1, 0)


def test_what_memcached_does_not_read_is_late_before_it_is_answered() -> None:
    counts = TapCounts()
    take(counts, row(1.0, 7, 0, asked_s=0.9995, read_s=0.999))
    assert counts.late_lately(LIMIT_S) == (7, 0)
    take(counts, row(1.0004, 7, 0, asked_s=0.9995, read_s=0.999))
    assert counts.late_lately(LIMIT_S) == (1, 0)  # it may still come in time
    for poll in range(3):
        take(counts, row(1.025 + 0.025 * poll, 7, 0, asked_s=0.9995, read_s=0.999))
        assert counts.late_lately(LIMIT_S) == (1, 1)
    take(counts, row(1.1, 8, 1, asked_s=0.9995, read_s=1.09))
    assert counts.late_lately(LIMIT_S) == (1, 1)
    take(counts, row(1.125, 8, 1, asked_s=0.9995, read_s=1.09))
    assert counts.late_lately(LIMIT_S) == (1, 0)


def test_a_connection_that_broke_is_not_late_for_ever() -> None:
    counts = TapCounts()
    take(counts, row(30.0, 0, 0, asked_s=1.0, read_s=0.9))
    assert counts.late_lately(LIMIT_S) == (1, 0)


@pytest.mark.parametrize("line", [b"", b"{", b'{"type": "printf", "data": "lost events"}'])
def test_a_line_that_is_cut_short_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        TapCounts().take(line)


@pytest.mark.parametrize("line", [b"[]", b"{}", b'{"type": "attached_probes", "data": {}}'])
def test_what_else_bpftrace_says_is_left_out(line: bytes) -> None:
    assert TapCounts().take(line) is None


# --- what it takes ----------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of a kernel's, which has all that the tap needs."""
    for name in tracer.TRACEPOINTS:
        (tmp_path / "tracing" / "events" / "sock" / name).mkdir(parents=True)
    (tmp_path / "btf").touch()
    (tmp_path / "lockdown").write_text("none [integrity] confidentiality\n")
    monkeypatch.setattr(tracer, "TRACING", (tmp_path / "nowhere", tmp_path / "tracing"))
    monkeypatch.setattr(tracer, "BTF", tmp_path / "btf")
    monkeypatch.setattr(tracer, "LOCKDOWN", tmp_path / "lockdown")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")
    return tmp_path


def test_nothing_is_in_the_way_of_a_kernel_that_has_it_all(kernel: Path) -> None:
    assert tracer.why_not() == ""


def test_what_is_in_the_way_is_named(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel / "tracing" / "events" / "sock" / "sk_data_ready").rmdir()
    assert "has no tracepoint sock:sk_data_ready" in tracer.why_not()
    (kernel / "tracing").rename(kernel / "moved")
    assert "tracefs is not mounted: mount -t tracefs" in tracer.why_not()
    (kernel / "btf").unlink()
    assert "does not describe its types" in tracer.why_not()
    (kernel / "lockdown").write_text("none integrity [confidentiality]\n")
    assert tracer.why_not() == "the kernel is locked down: confidentiality"
    monkeypatch.setattr("shutil.which", lambda program: None)
    assert tracer.why_not() == "bpftrace: not found; install it: apt-get install bpftrace"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert tracer.why_not() == "it takes root"


@pytest.mark.parametrize(("wanted", "verdict"), [(False, WARNING), (True, FAULT)])
def test_who_did_not_ask_for_it_is_only_warned(
    wanted: bool, verdict: str, kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings("127.0.0.1", 11211, "process", None, False, kernel, kernel, tap=wanted)
    (found,) = latency_tap(settings)
    assert (found.verdict, found.what) == (OK, "latency tap")
    monkeypatch.setattr("shutil.which", lambda program: None)
    (found,) = latency_tap(settings)
    assert found.verdict == verdict and found.found.startswith("bpftrace: not found")


@pytest.mark.parametrize(
    "numbers", [("16", "1000000", "1:11211; id"), ("16", "1000000", "1:0"), ("16", "11211")]
)
def test_nothing_but_whole_numbers_is_filled_in(
    numbers: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        tracer.main(numbers)
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
