"""Whatever a policy does wrong, the fallback decides."""

import time

import pytest

from agents.policy import Controller
from deploy.loop.loop import GuardedPolicy
from deploy.records.recorder import Recorder
from env.allocation import Allocation, JobAllocation, JobState
from env.scenario import load_scenario
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry
from tests.live.conftest import PATIENCE


class Misbehaving(Controller):
    """A policy that does what a test tells it to."""

    def __init__(self, behaviour):
        self.name, self.period_s, self.probe_window_s = "misbehaving", 0.1, 0.0
        self._behaviour = behaviour

    def decide(self, telemetry):
        return self._behaviour(telemetry)


def looking_like(scenario, time_s=1.0):
    applied = Allocation((0, 1), {name: JobAllocation(threads=1) for name in scenario.job_names})
    jobs = {name: JobTelemetry(JobState.PENDING, 0.0) for name in scenario.job_names}
    return Telemetry(time_s, ServiceTelemetry(0, 0, 0, 0, 0), (0.0, 0.0), jobs, applied)


def raises(telemetry):
    raise ZeroDivisionError("oh")


def late(telemetry):
    time.sleep(5.0)


def spins(telemetry):
    while True:
        pass


def illegal(telemetry):
    return Allocation(())


def not_a_number(telemetry):
    return Allocation((0,), {"dedup": JobAllocation(JobState.RUNNING, (float("nan"),), threads=1)})


def nothing(telemetry):
    return None


@pytest.mark.parametrize("behaviour", [raises, late, spins, illegal, not_a_number, nothing])
def test_whatever_a_policy_does_wrong_the_fallback_decides_at_once(
    scenario_file, tmp_path, behaviour
):
    scenario = load_scenario(scenario_file())
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    guarded = GuardedPolicy(Misbehaving(behaviour), scenario, recorder)
    before = time.monotonic()
    allocation = guarded.decide(looking_like(scenario), "")
    assert time.monotonic() - before < 2.0 * PATIENCE
    assert allocation.validate(scenario).service_cores == (0, 1)
    assert guarded.regulated
    said = [event.detail for event in recorder.recent if "the fallback decides" in event.detail]
    assert len(said) == 1
    recorder.close()


def test_a_policy_gets_three_chances(scenario_file, tmp_path):
    scenario = load_scenario(scenario_file())
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    asked = []

    def count(telemetry):
        asked.append(telemetry.time_s)
        raise ValueError("no")

    guarded = GuardedPolicy(Misbehaving(count), scenario, recorder)
    for second in range(60):
        guarded.decide(looking_like(scenario, float(second)), "")
    assert len(asked) == 3
    recorder.close()


def test_stale_telemetry_is_for_the_fallback_and_only_while_it_lasts(scenario_file, tmp_path):
    scenario = load_scenario(scenario_file())
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    guarded = GuardedPolicy(Misbehaving(lambda telemetry: Allocation((0,))), scenario, recorder)
    assert guarded.decide(looking_like(scenario), "too old").service_cores == (0, 1)
    assert guarded.decide(looking_like(scenario), "").service_cores == (0,)
    recorder.close()
