import numpy as np
import pytest
import torch

from env.action import KIND
from env.codes import KEEP, PENDING, START
from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory, Variation
from env.simulator.profile import load_profile
from env.simulator.vector_env import ColocationVecEnv
from training.imitation.demonstrations import Demonstrations
from training.imitation.expert import find_schedule
from training.imitation.fit_network import imitate
from training.ppo.fast_ppo import FastPPO
from training.ppo.training_run import new_model
from training.recipe import load_recipe

SMALL = load_recipe("best").imitation.model_copy(
    update={"search_evaluations": 300, "search_traces": 3, "epochs": (4, 24), "batch_size": 1024}
)


@pytest.fixture(scope="module", params=[True, False], ids=["sharing", "no sharing"])
def scenario(request):
    return load_scenario("cca-2025").with_changes(regulation={"share_service_cores": request.param})


def demonstrate(environments, schedule, rng):
    demonstrations = Demonstrations(environments, SMALL)
    demonstrations.demonstrate(schedule, rng)
    return demonstrations.dataset()


def stage(scenario):
    variation = Variation(physics=1.0, interval_s=(1.0, 15.0))
    return ColocationVecEnv(scenario, 32, gamma=1.0, seed=3, variation=variation)


def test_the_experts_edits_are_legal_and_get_the_jobs_done(scenario):
    _, schedule = find_schedule(EpisodeFactory(scenario), seed=1, imitation=SMALL)
    environments = stage(scenario)
    observations, edits, returns = demonstrate(environments, schedule, np.random.default_rng(0))
    legal = observations[:, observations.shape[1] - len(environments.factory.table) :]
    assert (legal[np.arange(len(edits)), edits] == 1.0).all()
    known = returns[~np.isnan(returns)]
    assert 0.2 * len(returns) < len(known) < len(returns)


def test_a_model_learns_what_the_expert_does(scenario):
    _, schedule = find_schedule(EpisodeFactory(scenario), seed=1, imitation=SMALL)
    model = new_model(load_recipe("default"), stage(scenario), 0, FastPPO)
    observations, edits, returns = demonstrate(stage(scenario), schedule, np.random.default_rng(7))
    seen, known = torch.from_numpy(observations), ~np.isnan(returns)

    def agreement_and_value_error():
        with torch.no_grad():
            distribution = model.policy.get_distribution(seen)
            values = model.policy.predict_values(seen).numpy()[:, 0]
        agreed = distribution.get_actions(deterministic=True).numpy() == edits
        changing = edits != 0
        return agreed[changing].mean(), np.abs(values - returns)[known].mean()

    before = agreement_and_value_error()
    imitate(model, stage(scenario), schedule, seed=5, imitation=SMALL)
    agreement, error = agreement_and_value_error()
    assert agreement > max(0.5, 2.0 * before[0])
    assert error < 0.9 * before[1]


class Idler:
    """A student who never does anything."""

    def predict(self, observations, deterministic):
        return np.zeros(len(observations), np.int64), None


def test_the_expert_says_what_a_student_who_plays_should_have_done(scenario):
    _, schedule = find_schedule(EpisodeFactory(scenario), seed=1, imitation=SMALL)
    environments = ColocationVecEnv(scenario, 32, gamma=1.0, seed=3, staggered=False)
    demonstrations = Demonstrations(environments, SMALL)
    demonstrations.demonstrate(schedule, np.random.default_rng(0), Idler())
    states = environments.hosts["state"]
    assert (states[:16] != PENDING).any() and (states[16:] == PENDING).all()
    edits = demonstrations.dataset()[1].reshape(-1, 32)[:, 16:]
    kinds = environments.factory.table.rows[edits, KIND]
    assert (kinds != KEEP).all() and (kinds == START).any()


def test_where_the_refuge_breaks_the_slo_the_expert_gives_more():
    """Two vCPUs that serve less than the load: nothing that keeps to them holds the SLO."""
    scenario = load_scenario("cca-2025")
    profile = load_profile("cca-2025")
    slow = {"core_capacity_qps": 0.8, "smt": 0.8, "outstanding": 1.2}
    service = {
        name: known.model_copy(update={"value": known.value * slow.get(name, 1.0)})
        for name, known in profile.service.items()
    }
    profile = profile.model_copy(update={"service": service, "hash": ""})
    _, schedule = find_schedule(EpisodeFactory(scenario), seed=1, imitation=SMALL)
    violated = {}
    for sets in ("refuge", "overflow"):
        service_part = {"overflow_cores": []} if sets == "refuge" else {}
        own = scenario.with_changes(service=service_part)
        environments = ColocationVecEnv(own, 64, 1.0, seed=3, profile=profile, staggered=False)
        demonstrate(environments, schedule, np.random.default_rng(0))
        hosts = environments.hosts
        violated[sets] = hosts["violations"].sum() / hosts["intervals"].sum()
        assert (hosts["refuge_p95_us"] > hosts["slo_us"]).any()
    assert violated["overflow"] < 0.5 * violated["refuge"]
