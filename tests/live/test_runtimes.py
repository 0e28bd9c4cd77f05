"""Starting jobs under a Docker that refuses, and reading what they leave."""

import json
import os
import select
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deploy.assembly import usable_hierarchy
from deploy.jobs import gate
from deploy.jobs.containers import DockerRuntime
from deploy.jobs.placement import session_members
from deploy.jobs.runtimes import (
    CUT,
    HELD,
    LOG_FILE,
    LOG_LIMIT_KIB,
    Attempt,
    JobFailedError,
    ProcessRuntime,
    RuntimeUnavailableError,
)
from deploy.linux.cgroups import job_groups_beside
from deploy.linux.service_process import stat_fields
from deploy.records.proof import prepare
from env.allocation import Weight
from env.scenario import load_scenario
from tests.live.conftest import PATIENCE, needs_groups


@needs_groups
def test_a_docker_that_cannot_be_reached_is_named_by_its_fault_alone(server, tmp_path):
    group = job_groups_beside(usable_hierarchy(), server.pid)("never-made")
    job = load_scenario("local").jobs[0]
    attempt = Attempt(job, 1, tmp_path, group)
    runtime = DockerRuntime(usable_hierarchy(), "parts", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(RuntimeUnavailableError) as found:
        runtime.find(attempt)
    assert str(found.value) == "Docker: No such file or directory"


def started(runtime, job, folder):
    """An attempt that has passed its gate."""
    prepare(folder)
    gate.make(folder)
    instance = runtime.start(Attempt(job, 1, folder, None), (0,), Weight.NORMAL)
    gate.await_passage(folder, 1)
    return instance


@pytest.mark.parametrize(
    ("status", "error"), [(400, JobFailedError), (500, RuntimeUnavailableError)]
)
@needs_groups
def test_what_docker_cannot_do_is_not_the_jobs_fault(
    server, scenario_file, tmp_path, status, error
):
    class Daemon(BaseHTTPRequestHandler):
        def do_GET(self):
            version = self.path == "/version"
            self.answer(200 if version else 404, ApiVersion="1.44", message="no such container")

        def do_POST(self):
            self.answer(status, message="no container today")

        def answer(self, code, **content):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_):
            pass

    hierarchy = usable_hierarchy()
    group = job_groups_beside(hierarchy, server.pid)(f"coretide-test-{os.getpid()}")
    group.create()
    daemon = HTTPServer(("127.0.0.1", 0), Daemon)
    threading.Thread(target=daemon.serve_forever, daemon=True).start()
    runtime = DockerRuntime(hierarchy, "parts", f"http://127.0.0.1:{daemon.server_port}")
    job = load_scenario(scenario_file()).jobs[0]
    try:
        with pytest.raises(error, match="no container today"):
            runtime.start(Attempt(job, 1, tmp_path, group), (0,), Weight.NORMAL)
    finally:
        daemon.shutdown()
        daemon.server_close()
        group.remove()


@pytest.mark.parametrize(("code", "tail"), [(0, ""), (3, "no luck")])
def test_what_a_job_has_written_may_be_larger_than_memory(scenario_file, tmp_path, code, tail):
    command = ["sh", "-c", f"truncate -s 1T log; echo >> log; echo no luck >> log; exit {code}"]
    job = load_scenario(scenario_file(dedup=command)).jobs[0]
    runtime = ProcessRuntime()
    instance = started(runtime, job, tmp_path)
    assert select.select([instance.ended], [], [], 10.0 * PATIENCE)[0]
    os.close(instance.ended)
    found, output = runtime.outcome(instance)
    assert (found, output.rpartition("\n")[2]) == (code, tail)


@pytest.mark.parametrize(("code", "shown"), [(0, CUT), (3, f"{CUT}\nno luck")])
def test_of_a_job_that_says_very_much_the_end_is_kept_and_the_cut_is_said(
    scenario_file, tmp_path, code, shown
):
    command = ["sh", "-c", f"head -c 100000000 /dev/zero; echo; echo no luck; exit {code}"]
    job = load_scenario(scenario_file(dedup=command)).jobs[0]
    runtime = ProcessRuntime()
    instance = started(runtime, job, tmp_path)
    largest = 0
    while not select.select([instance.ended], [], [], 0.001)[0]:
        largest = max(largest, (tmp_path / LOG_FILE).stat().st_size)
    os.close(instance.ended)
    found, output = runtime.outcome(instance)
    largest = max(largest, (tmp_path / LOG_FILE).stat().st_size)
    assert largest <= (LOG_LIMIT_KIB << 10) + 1
    assert found == code
    assert "\n".join(line for line in output.splitlines() if "\0" not in line) == shown


def test_whoever_a_job_leaves_running_does_not_hold_up_its_end(scenario_file, tmp_path):
    command = ["sh", "-c", "sleep 100 & echo no luck; exit 3"]
    job = load_scenario(scenario_file(dedup=command)).jobs[0]
    runtime = ProcessRuntime()
    instance = started(runtime, job, tmp_path)
    assert select.select([instance.ended], [], [], 10.0 * PATIENCE)[0]
    assert runtime.outcome(instance) == (3, HELD)
    runtime.remove(instance)
    left = [stat_fields(pid)[0] for pid in session_members(instance.pid)]
    assert set(left) <= {"Z"}  # whom nobody waits for
    os.close(instance.ended)
