"""Profiles: reading, writing, and what a broken file says."""

import numpy as np
import pytest
import yaml

from env.physics.parameters import AGENT_CPU, HOST_FIELDS, INTERRUPTION, JOB_FIELDS, JOB_SPEED
from env.physics.service import SERVICE_FIELDS, VM_SPEED
from env.scenario import PROFILE_FOLDER, profile_names, profile_path
from env.simulator.profile import (
    Background,
    Parameter,
    content_hash,
    load_profile,
    save_profile,
)

JOBS = ("blackscholes", "canneal", "dedup", "ferret", "freqmine", "radix", "vips")


@pytest.mark.parametrize("name", ["cca-2025", "cca-2024"])
def test_built_in_profiles(name):
    profile = load_profile(name)
    assert profile.name == name and profile.hash == content_hash(profile)
    assert profile.job_array(JOBS).shape == (7, len(JOB_FIELDS))
    assert profile.service_array().shape == (len(SERVICE_FIELDS),)
    assert profile.host_array().shape == (len(HOST_FIELDS),)
    for values, spreads in (
        (profile.job_array(JOBS), profile.job_spreads(JOBS)),
        (profile.service_array(), profile.service_spreads()),
        (profile.host_array(), profile.host_spreads()),
    ):
        values = values[..., : spreads.shape[-1]]  # the rest may be left out
        assert values.shape == spreads.shape
        assert (values > 0.0).all() and np.isfinite(values).all() and (spreads >= 0.0).all()
    assert profile.fit_error and all(error >= 0.0 for error in profile.fit_error.values())


def test_job_rows_follow_the_given_order():
    profile = load_profile("cca-2025")
    swapped = profile.job_array(("vips", "blackscholes"))
    assert (swapped == profile.job_array(JOBS)[[6, 0]]).all()
    assert profile.job_array(()).shape == (0, len(JOB_FIELDS))


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"known profiles: cca-2024, cca-2025, local, prm-2020"):
        load_profile("cca-1999")
    with pytest.raises(ValueError, match=r"no job 'doom'; known jobs: blackscholes"):
        load_profile("cca-2025").job_array(("doom",))
    assert profile_names() == ["cca-2024", "cca-2025", "local", "prm-2020"]


def test_saving_is_reproducible(tmp_path):
    profile = load_profile("cca-2025")
    save_profile(profile, tmp_path / "a.yaml")
    save_profile(load_profile(tmp_path / "a.yaml"), tmp_path / "b.yaml")
    assert (tmp_path / "a.yaml").read_bytes() == (tmp_path / "b.yaml").read_bytes()


def test_what_requests_cost_may_be_left_out(tmp_path):
    known = load_profile("cca-2025")
    assert known.cost_array().tolist() == [1.0, 0.0, 1.0, 0.0]  # the load comes from elsewhere
    client = Parameter(value=0.5, spread=0.1, source="a test")
    costly = known.model_copy(update={"costs": {"client_cpu": client}})
    assert content_hash(costly) != content_hash(known)
    save_profile(costly, tmp_path / "costly.yaml")
    assert load_profile(tmp_path / "costly.yaml").cost_array().tolist() == [1.0, 0.5, 1.0, 0.0]


def test_what_a_load_generators_company_costs_a_job_may_be_left_out():
    known = load_profile("cca-2025")
    assert not known.job_array(JOBS)[:, INTERRUPTION].any()
    cost = Parameter(value=0.5, spread=0.1, source="a test")
    vips = known.jobs["vips"] | {"interruption": cost}
    costly = known.model_copy(update={"jobs": known.jobs | {"vips": vips}})
    assert costly.job_array(JOBS)[:, INTERRUPTION].tolist() == [0.0] * 6 + [0.5]
    spreads = costly.job_spreads(JOBS)
    assert spreads[:, INTERRUPTION].tolist() == [0.0] * 6 + [0.1]
    # Those who lack it draw what they always drew.
    assert (known.job_spreads(JOBS) == spreads[:, :INTERRUPTION]).all()


def test_a_profile_may_say_how_background_work_yielded(tmp_path):
    known = load_profile("cca-2025")
    assert known.background is None
    measured = known.model_copy(
        update={"background": Background(mechanism="cpu.idle", kernel="6.18.0")}
    )
    save_profile(measured, tmp_path / "measured.yaml")
    assert load_profile(tmp_path / "measured.yaml").background == measured.background
    assert content_hash(measured) != content_hash(known)


def broken(tmp_path, change, keep_hash=False):
    """A copy of a shipped profile, changed in place."""
    content = yaml.safe_load((PROFILE_FOLDER / "cca-2025.yaml").read_text())
    change(content)
    if not keep_hash:
        content["hash"] = ""
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["host"].pop("sensor_noise"), "host.sensor_noise: is missing"),
        (lambda c: c["jobs"]["vips"].pop("smt"), "jobs.vips.smt: is missing"),
        (
            lambda c: c["host"].update(speed=dict(c["host"]["job_speed"])),
            "host.speed: unknown field",
        ),
        (lambda c: c["jobs"]["vips"]["smt"].update(value=1.5), "jobs.vips.smt: value 1.5 must lie"),
        (lambda c: c["jobs"]["vips"]["smt"].update(value=-1), "jobs.vips.smt.value"),
        (lambda c: c["jobs"]["vips"]["smt"].update(value=float("nan")), "jobs.vips.smt.value"),
        (lambda c: c["jobs"]["vips"]["smt"].update(spread="wide"), "jobs.vips.smt.spread"),
        (lambda c: c.update(extra=1), "extra"),
        (lambda c: c.pop("jobs"), "jobs"),
        (lambda c: c.update(siblings=[2, 3, 0, 0]), "siblings: vCPU 1 has 3; allowed are -1"),
        (lambda c: c.update(siblings=[1, 0, 2, -1]), "siblings: vCPU 2 has 2; allowed are -1"),
        (lambda c: c.update(siblings=[-1, 4, -1, -1]), "another vCPU, 0 to 3, that has 1 in turn"),
        (
            lambda c: c.update(costs={"client": dict(c["host"]["job_speed"])}),
            "costs.client: unknown",
        ),
    ],
)
def test_broken_profiles_name_file_and_field(tmp_path, change, message):
    path = broken(tmp_path, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_profile(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_edited_profile_is_refused(tmp_path):
    def change(content):
        content["jobs"]["vips"]["work_s"]["value"] += 1.0

    with pytest.raises(ValueError, match="hash: does not match"):
        load_profile(broken(tmp_path, change, keep_hash=True))


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [1\n", "\x00"])
def test_files_that_are_no_profile(tmp_path, text):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"odd\.yaml: (must be a mapping|not valid YAML)"
    ) as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        load_profile(tmp_path / "absent.yaml")


def test_a_vm_of_the_fit_has_its_own_speed_and_idle_latency():
    profile = load_profile("cca-2025")
    name, vm = next(iter(profile.vms.items()))
    changed = profile.on_vm(name)
    factors = changed.service_array() / profile.service_array()
    expected = np.ones(len(SERVICE_FIELDS))
    expected[SERVICE_FIELDS.index("vm_speed")] = vm.speed
    expected[SERVICE_FIELDS.index("idle_us")] = vm.idle
    assert factors == pytest.approx(expected)
    with pytest.raises(ValueError, match="no VM 'x'; known: "):
        profile.on_vm("x")


def test_a_host_that_is_slower_does_all_work_slower():
    profile = load_profile("local")
    loop = Parameter(value=0.1, spread=0.2, unit="vCPU", source="test")
    profile = profile.model_copy(update={"costs": profile.costs | {"agent_cpu": loop}})
    slow = profile.at_speed(0.5)
    for array, field, factor in (
        ("service_array", VM_SPEED, 0.5),
        ("host_array", JOB_SPEED, 0.5),
        ("cost_array", AGENT_CPU, 2.0),
    ):
        before, after = getattr(profile, array)(), getattr(slow, array)()
        assert after[field] == pytest.approx(factor * before[field])
        assert np.array_equal(np.delete(after, field), np.delete(before, field))
    assert profile.at_speed(1.0) == profile
    assert profile.at_speed(1e-6).costs["agent_cpu"].value == 1.0  # a loop takes a vCPU at most


def test_what_a_piece_of_work_took_is_kept_and_may_be_left_out(tmp_path):
    profile = load_profile("prm-2020")
    assert profile.yardstick_us is None
    assert "yardstick_us" not in profile_path("prm-2020").read_text()
    told = profile.model_copy(update={"yardstick_us": 130.0})
    save_profile(told, tmp_path / "told.yaml")
    assert load_profile(tmp_path / "told.yaml").yardstick_us == 130.0
    assert content_hash(told) != content_hash(profile)


def test_the_local_profile_was_measured_as_deployments_run():
    profile = load_profile("local")
    assert profile.background is not None
    assert profile.background.mechanism == "cpu.idle" and profile.background.kernel
    assert profile.yardstick_us is not None
    for trait in ("gate_latency_s", "stalls_per_s", "stall_s", "steals_per_s", "steal_s"):
        assert "prior (2024" not in profile.host[trait].source
    assert {"agent_cpu", "client_cpu"} <= profile.costs.keys()
