"""The scenario that the tests of a characterisation measure."""

import pytest
import yaml

from env.scenario import Scenario, load_scenario
from env.simulator.profile import load_profile, save_profile

CONTENT = {
    "name": "here",
    "description": "two vCPUs",
    "profile": "prior.yaml",
    "machine": {"vcpus": 2, "memory_mib": 2048},
    "service": {"threads": 2, "slo_us": 800, "core_choices": [[0], [0, 1]]},
    "jobs": [
        {
            "name": "matrix",
            "command": ["stress-ng", "--quiet", "--matrix", "{threads}", "--matrix-ops", "20000"],
            "threads": [1, 2],
            "memory_mib": 256,
        }
    ],
    "load": {"qps_min": 5000, "qps_max": 180000, "interval_s": 10, "duration_s": 1800},
    "control": {"period_s": 0.025, "hold_s": 1.0, "wake_qps": 15000},
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    folder = tmp_path_factory.mktemp("scenario")
    base = load_profile("cca-2025")
    jobs = {"matrix": base.jobs["vips"]}
    save_profile(base.model_copy(update={"jobs": jobs, "name": "prior"}), folder / "prior.yaml")
    (folder / "here.yaml").write_text(yaml.safe_dump(CONTENT))
    return load_scenario(folder / "here.yaml")
