"""Starting jobs under a Docker that refuses, and reading what they leave."""

import json
import os
import select
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deploy.assembly import usable_hierarchy
from deploy.jobs.containers import DockerRuntime
from deploy.jobs.runtimes import Attempt, JobFailedError, ProcessRuntime, RuntimeUnavailableError
from deploy.linux.cgroups import job_groups_beside
from deploy.records.proof import prepare
from env.allocation import Weight
from env.scenario import load_scenario
from tests.live.conftest import PATIENCE, needs_groups


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
            runtime.start(Attempt(job, 1, 1, tmp_path, group), (0,), Weight.NORMAL)
    finally:
        daemon.shutdown()
        daemon.server_close()
        group.remove()


@pytest.mark.parametrize(("code", "tail"), [(0, ""), (3, "no luck")])
def test_what_a_job_has_written_may_be_larger_than_memory(scenario_file, tmp_path, code, tail):
    command = ["sh", "-c", f"truncate -s 1T log; echo >> log; echo no luck >> log; exit {code}"]
    job = load_scenario(scenario_file(dedup=command)).jobs[0]
    prepare(tmp_path)
    runtime = ProcessRuntime()
    instance = runtime.start(Attempt(job, 1, 1, tmp_path, None), (0,), Weight.NORMAL)
    assert select.select([instance.ended], [], [], 10.0 * PATIENCE)[0]
    os.close(instance.ended)
    found, output = runtime.outcome(instance)
    assert (found, output.rpartition("\n")[2]) == (code, tail)
