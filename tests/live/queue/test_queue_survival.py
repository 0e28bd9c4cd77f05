"""Ten jobs handed in at random beside a loaded memcached, with a kill of the loop between."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from deploy.records.recorder import read_events
from deploy.records.run_report import read_report
from tests.live.conftest import ROOT, assert_as_found

pytestmark = pytest.mark.survival

SEED, JOBS, KILLED_AFTER = 11, 10, 5


@pytest.mark.parametrize("policy", ["first-come", "checkpoints/general.zip"])
def test_ten_jobs_at_random_times_and_a_kill_are_each_done_once(
    deploy, server, scenario_file, queue, policy
):
    rng, names = random.Random(SEED), [f"job-{number}" for number in range(JOBS)]
    options = ["--policy", policy, "--scenario", str(scenario_file()), "--probe"]
    options += ["--runtime", "process", "--queue", str(queue.path)]
    run = deploy(*options)
    run.expect("memcached update_cores")
    load = subprocess.Popen(
        [
            *(sys.executable, "-m", "deploy.load", "--trace-seed", "7", "--qps-min", "2000"),
            *("--memcached", f"{server.host}:{server.port}", "--qps-max", "30000"),
            *("--interval", "2", "--duration", "600"),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        for name in names:
            work = f"stress-ng --quiet --cpu {{threads}} --cpu-ops {rng.randrange(50, 300)}"
            note = f"echo begin {name} >> {queue.ran}; {work}; echo end {name} >> {queue.ran}"
            queue.drop_text(name, queue.describe(name, ["sh", "-c", note]))
            time.sleep(rng.uniform(0.2, 2.0))
            if name == names[KILLED_AFTER]:
                run.kill()
                time.sleep(rng.uniform(0.1, 1.0))
                run = deploy(*options, "--resume")
        queue.expect("done", *names, limit_s=150)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM, run.lines
    finally:
        load.kill()
        load.wait()
    assert_as_found(server, run)
    assert queue.names("accepted") + queue.names("running") + queue.names("failed") == []
    ran = Counter(queue.ran.read_text().splitlines())
    assert ran == {f"{what} {name}": 1 for name in names for what in ("begin", "end")}
    assert all(queue.outcome("done", name)["attempts"] == 1 for name in names)
    ended = Counter(event.job for event in read_events(run.report) if event.what == "end")
    assert {name: ended[name] for name in names} == dict.fromkeys(names, 1)
    report = read_report(run.report)
    assert report["violation_ratio"] is not None
    spoiled = sum(report["spoiled"])
    said = f"{report['violation_ratio']:.3f} of {len(report['p95_us'])} intervals"
    print(f"violated: {said}, {spoiled} of them spoiled; loop {report['loop']['cpu_pct']:.1f} %")
