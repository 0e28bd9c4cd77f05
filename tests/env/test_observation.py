"""The observation: as long and as bounded as documented, the same live and simulated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env import action, observation
from env.allocation import JobState, cores_of
from env.control import HISTORY, ControlState
from env.observation import GLOBAL_FEATURES, JOB_FEATURES, feature_count, observe
from env.scenario import Scenario, load_scenario, scenario_names
from env.simulator.machine import EpisodeFactory, Variation
from tests.conftest import Rig

HIGHEST = 3.0
"""No feature is larger: readings of a noisy sensor pass their scale by less than that."""


def documented_rows() -> list[tuple[str, str]]:
    """Size and content of each row of the module's table, continuation lines joined."""
    lines = [line for line in (observation.__doc__ or "").splitlines() if line.startswith("|")]
    rows: list[tuple[str, str]] = []
    for line in lines[2:]:
        size, content, _ = (cell.strip() for cell in line.strip("|").split("|"))
        if size:
            rows.append((size, content))
        else:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {content}")
    return rows


def features_of(control: ControlState, scenario: Scenario) -> list[float]:
    features = [-1.0] * feature_count(scenario)
    observe(control, control.n_vcpus, features)
    return features


def part(features: list[float], vcpus: int, job: int) -> list[float]:
    """The features of one job."""
    size = JOB_FEATURES + vcpus
    start = GLOBAL_FEATURES + vcpus + job * size
    return features[start : start + size]


@pytest.mark.parametrize("name", scenario_names())
def test_the_documented_table_adds_up(name: str) -> None:
    scenario = load_scenario(name)
    n_edits = len(action.edit_table(scenario))
    sizes = {"HISTORY": HISTORY, "C": scenario.machine.vcpus, "J": len(scenario.jobs)}
    total = 0
    for size, _ in documented_rows():
        expression = size.replace("x", "*").replace("n_edits", str(n_edits))
        total += eval(expression, {"__builtins__": {}}, sizes)
    factory = EpisodeFactory(scenario)
    assert total == feature_count(scenario) + n_edits == factory.observation_size


def test_the_documented_order(rig: Rig, scenario: Scenario) -> None:
    """Each global row of the table is found where it says, by a value of its own."""
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))
    control.now_s = 100.0
    control.qps = 0.5 * scenario.load.qps_max
    control.cpu_cores = 1.2
    control.past_qps = [control.qps_scale * share for share in (0.4, 0.3, 0.2)]
    control.load_moved_at_s = 93.0
    control.load_gap_s = 12.0
    control.grown_at_s = 100.0 - 0.25 * scenario.regulation.service_dwell_s
    control.decided_at_s = 100.0 - 0.75 * scenario.control.hold_s
    control.kept = 0
    control.service = 0b0011
    control.probed_p95_us = 0.5 * scenario.service.slo_us
    control.worst_p95_us = 1.5 * scenario.service.slo_us
    control.refuge_p95_us = 1.2 * scenario.service.slo_us
    control.guard_level = 3
    values = features_of(control, scenario)
    assert values[: GLOBAL_FEATURES + 4] == pytest.approx(
        [0.5, 0.3, 0.6, 0.4, 0.3, 0.2, 0.7, 1.2, 0.25, 0.75, 0, 1, 0.5, 1.5, 1.2, 0.75, 1, 1, 0, 0]
    )
    contents = [content for _, content in documented_rows()]
    assert contents[0].startswith("load")
    assert "earlier loads" in contents[3]
    assert "grew" in contents[6]
    control.now_s = 1e6
    control.load_gap_s = 1e5
    control.probed_p95_us = control.worst_p95_us = control.refuge_p95_us = 1e6
    assert features_of(control, scenario)[6:10] == [2.0, 2.0, 1.0, 1.0]
    assert features_of(control, scenario)[11:15] == [1.0, 2.0, 2.0, 2.0]
    control.probed_p95_us = control.worst_p95_us = control.refuge_p95_us = 0.0
    assert features_of(control, scenario)[11:15] == [0.0] * 4


@pytest.mark.parametrize("state", list(JobState))
def test_a_job_as_it_is_shown(scenario: Scenario, state: JobState) -> None:
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))
    job = 3
    control.state[job] = int(state)
    control.cores[job], control.weight[job], control.threads[job] = 0b1100, 0, 2
    control.job_cpu_s[job] = 25.0
    shown = part(features_of(control, scenario), 4, job)
    active = state in (JobState.RUNNING, JobState.PAUSED)
    assert shown[:4] == [float(state == other) for other in list(JobState)[:4]]
    assert shown[4] == 0.25
    assert shown[5:] == ([0.5, 1, 0, 0, 1, 1] if active else [0] * 6)
    control.job_state[job] = int(JobState.DONE)
    assert part(features_of(control, scenario), 4, job)[:4] == [0, 0, 0, 1]
    control.job_cpu_s[job] = 1e9
    assert part(features_of(control, scenario), 4, job)[4] == 2.0


def test_a_bad_reading_of_the_probe_fades(scenario: Scenario) -> None:
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))
    control.probed_p95_us = 900.0
    observation.remember(control)
    assert control.worst_p95_us == 900.0
    control.probed_p95_us = 300.0
    control.decided_at_s, control.now_s = 0.0, 0.5 * observation.FADE_S
    observation.remember(control)
    assert control.worst_p95_us == 450.0
    control.now_s = 2.0 * observation.FADE_S
    observation.remember(control)
    assert control.worst_p95_us == 300.0


def test_history_moves_on_with_each_decision(scenario: Scenario) -> None:
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))
    for number in range(1, 6):
        control.qps, control.now_s = 1000.0 * number, float(number)
        observation.shift_history(control)
    assert control.past_qps == [5000.0, 4000.0, 3000.0]
    assert control.decided_at_s == 5.0


def test_a_load_move_is_remembered(scenario: Scenario) -> None:
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))
    control.settled_qps = 50_000.0
    small = scenario.control.wake_qps
    for now_s, qps, moved_at_s, gap_s in (
        (10.0, 50_000.0 + small, 0.0, 0.0),  # not more than the threshold: no move
        (20.0, 50_001.0 + small, 20.0, 20.0),
        (25.0, 50_001.0 + small, 20.0, 20.0),
        (32.0, 49_999.0, 32.0, 12.0),
    ):
        control.now_s, control.qps = now_s, qps
        observation.remember(control)
        assert (control.load_moved_at_s, control.load_gap_s) == (moved_at_s, gap_s)


@pytest.mark.parametrize("qps", [20_000.0, 60_000.0, 150_000.0])
def test_sensor_noise_is_not_taken_for_a_load_move(rig: Rig, qps: float) -> None:
    rig.begin(1, [qps])
    moved_at_s = set()
    for _ in range(500):
        rig.step(0)
        moved_at_s.add(float(rig.row["load_moved_at_s"]))
    assert len(moved_at_s) < 25  # in eight minutes of steady load


def check_bounds(rig: Rig, seed: int, decisions: int) -> None:
    rng = np.random.default_rng(seed)
    rig.begin(seed, work=float(rng.choice([0.05, 1.0])))
    n_features = feature_count(rig.scenario)
    vcpus = rig.scenario.machine.vcpus
    for _ in range(decisions):
        row = rig.observe()
        assert np.isfinite(row).all()
        assert row.min() >= 0.0
        assert row.max() <= HIGHEST
        assert set(row[n_features:]) <= {0.0, 1.0}
        assert row[n_features:].any()  # something is always allowed
        held = row[GLOBAL_FEATURES : GLOBAL_FEATURES + vcpus]
        assert np.flatnonzero(held).tolist() == list(cores_of(int(rig.row["service"])))
        for job in range(len(rig.scenario.jobs)):
            assert sum(part(row.tolist(), vcpus, job)[:4]) == 1.0
        ended, _ = rig.step(0 if rng.random() < 0.5 else int(rng.choice(rig.legal())))
        if ended:
            return


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_every_reachable_state_is_shown_within_bounds(seed: int, varied: bool) -> None:
    check_bounds(Rig(VARIED if varied else PLAIN), seed, decisions=200)


PLAIN = EpisodeFactory(load_scenario("cca-2025"))
VARIED = EpisodeFactory(load_scenario("cca-2025"), variation=Variation(1.0, (2.0, 20.0)))


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1))
def test_live_and_compiled_observations_are_equal_bit_for_bit(seed: int) -> None:
    rig = Rig(PLAIN)
    rng = np.random.default_rng(seed)
    rig.begin(seed, work=0.1)
    rows, n_features = PLAIN.table.rows, feature_count(rig.scenario)
    for _ in range(150):
        control = rig.control()
        legal = [-1.0] * len(rows)
        action.legal_edits(control, rows, legal)
        live = np.array(features_of(control, rig.scenario) + legal, np.float32)
        compiled = rig.observe()
        assert live.tobytes() == compiled.tobytes()
        assert n_features + len(rows) == len(compiled)
        if rig.step(0 if rng.random() < 0.3 else int(rng.choice(rig.legal())))[0]:
            return
