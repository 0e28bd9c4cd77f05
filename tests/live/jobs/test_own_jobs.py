"""Jobs that no profile knows: measured, rehearsed and written down on the real machine."""

import json
import math
import platform
from pathlib import Path

import pytest
import yaml

from env.scenario import SCENARIO_FOLDER, load_scenario
from env.simulator.profile import load_profile
from tests.live.conftest import needs_docker
from training.machine.characterisation import characterise
from training.machine.fit_machine import fit_machine
from training.measuring.campaign import CampaignPlan, job_runs
from training.measuring.rounds import Store
from training.measuring.samples import SERVING
from training.measuring.testbed import Timing
from training.refinement.rehearsal import LIMITS, VERDICT_FILE

BRIEF = CampaignPlan("brief", Timing(0.3, 0.1), (1, 1), 0.0, 40.0, 2.0)
COUNT = "sum(i * i for i in range(30_000_000))"
FORK = f"import multiprocessing as m; p = m.Pool({{threads}}); p.map(eval, [{COUNT!r}] * 2)"


@pytest.mark.survival
@needs_docker
def test_commands_that_no_profile_knows_get_a_profile_and_a_verdict(tmp_path: Path) -> None:
    content = yaml.safe_load((SCENARIO_FOLDER / "local.yaml").read_text())
    content["jobs"] = [
        {"name": name, "command": ["python3", "-c", code], "threads": threads, "memory_mib": 256}
        for name, code, threads in (("count", COUNT, [1]), ("fork", FORK, [1, 2]))
    ]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    scenario = load_scenario(tmp_path / "mine.yaml", unmeasured=True)
    out = tmp_path / "mine"
    lines, _ = characterise(scenario, BRIEF, out, despite_load=True)
    made = load_scenario(out / "scenario.yaml")
    profile = load_profile(made.profile)
    assert made.jobs == scenario.jobs and set(profile.jobs) == {"count", "fork"}
    assert profile.background is not None and profile.background.mechanism
    assert profile.background.kernel == platform.release()
    store = Store(out, json.loads((out / "plan.json").read_text()))
    runs, base = job_runs(store), load_profile(scenario.profile)
    tables = store.table("latency"), runs, store.table("actuation")
    alone = runs[(runs["job"] == "count") & (runs["beside"] != SERVING)]
    work = fit_machine(scenario, base, *tables, "here").jobs["count"]["work_s"]
    # Beside memcached it costs more, and a busy machine's caches do not help.
    off = abs(math.log(work.value / alone["cpu_s"].median()))
    assert off < 0.2 + 2.0 * work.spread
    verdicts = json.loads((out / VERDICT_FILE).read_text())
    assert [one["prediction"] for one in verdicts] == list(LIMITS)
    assert any(one["error"] is not None for one in verdicts), verdicts
    assert any("refined by 1 run" in known.source for known in profile.service.values())
    for name in LIMITS:
        assert any(line.startswith(f"{name}: ") for line in lines)
    assert any(line.startswith("job fork: ") for line in lines)
