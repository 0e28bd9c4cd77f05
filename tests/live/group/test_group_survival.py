"""A million requests to a group that loses a member, beside batch jobs and under the scheduler."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.group.group import GroupSetup, running
from deploy.tap.tracer import why_not
from tests.deploy.group.asker import lose_a_member
from tests.deploy.group.needs import needs_proxy
from tests.live.conftest import Deployment
from tests.live.group.conftest import EVERYWHERE, LONG, await_on, others

pytestmark = [needs_proxy, pytest.mark.survival]


def test_a_million_requests_survive_a_lost_member_beside_batch_jobs(
    tmp_path: Path, group_file: Callable[..., Path], groups_file: Path
) -> None:
    jobs = {"dedup": LONG, "radix": LONG}
    scenario = group_file(jobs, proxy="memcached", members=3, replicas=3, threads=4)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    options += [] if why_not() else ["--tap"]
    with running(GroupSetup(members=3, replicas=3)) as group:
        run = Deployment(tmp_path, group.proxy, *options, *others(group.members))
        try:
            run.expect("start")
            lost = group.members[1].pid
            lose_a_member(group, 1_000_000)
            run.expect(rf"member 2: process {lost} has ended; .* other replicas: 2$")
            run.expect(rf"memcached member 2: process {group.members[1].pid}$")

            dead = group.members.pop()
            dead.process.kill()
            dead.process.wait()
            run.expect(rf"member 3: process {dead.pid} has ended; .* other replicas: 1$")
            run.kill()  # the guardian makes the others safe
            await_on([group.proxy, *group.members], EVERYWHERE)
            undo = Deployment(tmp_path, group.proxy, "--restore")
            undo.finish()
            undo.expect(f"memcached {dead.pid} is gone; all else is as it was found")
            undo.close()
        finally:
            run.close()
        await_on([group.proxy, *group.members], EVERYWHERE)
    rows = list(csv.DictReader((run.report / "samples.csv").open(encoding="utf-8")))
    served = [float(row["requests"]) for row in rows]
    assert served == sorted(served) and served[-1] > 700_000, "counted on after the member was back"
    assert all(float(rows[-1][f"job_{job}_cpu_s"]) > 0.0 for job in jobs)
