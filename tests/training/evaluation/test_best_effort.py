"""Jobs without end: they run as long as the load, and their work is compared with running alone."""

import json

import numpy as np
import pytest

import agents
from env.errors import InputError
from env.scenario import Scenario, load_scenario
from env.simulator.load import load_targets
from env.simulator.machine import EpisodeFactory
from env.simulator.profile import load_profile
from training.evaluation import comparison
from training.evaluation.endless_work import speed_alone, throughputs
from training.evaluation.episodes import run_episodes, starts_from

PROFILE = load_profile("cca-2025")


@pytest.fixture(scope="module")
def endless() -> Scenario:
    shipped = load_scenario("cca-2025").with_changes(
        load={"duration_s": 300, "qps_max": 6000, "targets": [5000]}
    )
    jobs = tuple(job.model_copy(update={"endless": True}) for job in shipped.jobs)
    return shipped.model_copy(update={"jobs": jobs})


def runs_of(name, scenario):
    return run_episodes(agents.make(name), EpisodeFactory(scenario), starts_from(0, 1))


def test_an_endless_load_runs_as_long_as_the_load(endless):
    (run,) = runs_of("concurrent", endless)
    assert not run.error
    assert run.summary["makespan_s"] == 300.0
    assert not run.completed
    assert all(job["end_s"] is None for job in run.summary["jobs"].values())


def test_throughput_is_a_share_of_what_the_jobs_get_done_alone(endless):
    alone = speed_alone(endless, PROFILE)
    assert 1.5 < alone < 4.0  # four vCPUs, less what siblings cost each other
    shares = {
        name: throughputs(runs_of(name, endless), alone)[0]
        for name in ("concurrent", "static", "latency-aware-prm")
    }
    # memcached alone on one vCPU of four, on two, and on all with the jobs' quota climbing slowly.
    assert 0.5 < shares["static"] < shares["concurrent"] < 1.0
    assert 0.0 < shares["latency-aware-prm"] < 0.4


def test_evaluation_reports_throughput_in_place_of_makespan(tmp_path, capsys):
    figures = tmp_path / "prm.json"
    line = "--scenario prm-2020 --policy hybrid-prm --policy intel-prm --episodes 1"
    comparison.main([*line.split(), "--json", str(figures)])
    entries = {entry["name"]: entry for entry in json.loads(figures.read_text())["policies"]}
    assert entries["intel-prm"]["throughput"]["mean"] < entries["hybrid-prm"]["throughput"]["mean"]
    shown = capsys.readouterr().out
    assert "best-effort" in shown
    assert "makespan" not in shown


def test_listed_targets_come_in_their_order_and_again(endless):
    load = endless.load.model_copy(update={"targets": (5000, 6000), "target_intervals": 2})
    expected = [5000, 5000, 6000, 6000, 5000]
    assert load_targets(load, 1, 5).tolist() == load_targets(load, 2, 5).tolist() == expected
    factory = EpisodeFactory(endless.model_copy(update={"load": load}))
    hosts, targets = factory.new_hosts(1), factory.new_targets(1)
    factory.begin(hosts, targets, 0, 77, np.random.default_rng(0))
    assert targets[0, :5].tolist() == expected


def test_targets_outside_the_range_are_named():
    with pytest.raises(InputError, match=r"targets: 200000 is not from 5000 to 180000"):
        load_scenario("cca-2025").with_changes(load={"targets": [5000, 200000]})
