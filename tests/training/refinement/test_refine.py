"""A profile that is corrected by a recorded run, and the command that does so."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from agents.checkpoint import read_checkpoint
from env.scenario import PROFILE_FOLDER, profile_hash
from env.simulator.profile import Profile, load_profile
from tests.training.refinement.recorded import RUN, in_the_present_form
from training.refinement import refining
from training.refinement.live_replay import LiveReplay
from training.refinement.live_run import read_live_run
from training.refinement.profile_update import JOB_SPEED_DRIFT, Update, update

CHECKPOINT = "checkpoints/local.zip"


@pytest.fixture(scope="module")
def replay() -> LiveReplay:
    return LiveReplay(read_live_run(RUN))


@pytest.fixture(scope="module")
def found(replay: LiveReplay) -> Update:
    return update(load_profile("local"), [replay])


def misses(replay: LiveReplay, profile: Profile) -> float:
    """The median of how far the jobs' times are off, as a logarithm."""
    played = replay.play(profile, closed=False)
    ran_s = np.array([job.run_s for job in replay.run.trace.jobs])
    return float(np.median(np.abs(np.log(played.run_s / ran_s))))


def test_what_was_measured_is_better_predicted_afterwards(
    replay: LiveReplay, found: Update
) -> None:
    before, after = misses(replay, load_profile("local")), misses(replay, found.profile)
    assert after < 0.5 * before


def test_spreads_only_narrow_and_what_is_not_told_stays(found: Update) -> None:
    before, after = load_profile("local"), found.profile
    for section in ("service", "costs", "host"):
        for name, known in getattr(before, section).items():
            now = getattr(after, section)[name]
            own = name == "core_capacity_qps"  # it takes the VM's own speed, which is not known
            prior = math.hypot(known.spread, before.vm_speed.spread) if own else known.spread
            assert now.spread <= prior * 1.001  # written with three digits
            assert (f"{section}.{name}" in found.moved) == (now != known)
    # Two vCPUs that are not siblings tell nothing of siblings, nor a run of the load's own clock.
    for name in ("smt", "batch_smt"):
        assert after.service[name] == before.service[name]
    assert after.host["load_lag_low_s"] == before.host["load_lag_low_s"]
    assert "refined by 1 run " in after.service["core_capacity_qps"].source


def test_a_second_look_at_the_same_run_changes_little(replay: LiveReplay, found: Update) -> None:
    assert misses(replay, update(found.profile, [replay]).profile) < 1.2 * misses(
        replay, found.profile
    )


def test_a_host_that_does_more_in_another_hour_is_believed(
    replay: LiveReplay, found: Update
) -> None:
    """Then all jobs' speed is news; without a drift it is what they were measured at."""
    known = found.profile.host["job_speed"]
    slower = known.model_copy(update={"value": 0.8 * known.value})
    host = {**found.profile.host, "job_speed": slower}
    before = found.profile.model_copy(update={"host": host})
    drifted = update(before, [replay], JOB_SPEED_DRIFT).profile
    held = update(before, [replay]).profile
    assert drifted.host["job_speed"].value > 0.92 * known.value
    assert held.host["job_speed"].value < 0.88 * known.value
    assert misses(replay, drifted) <= misses(replay, held)


def test_the_command_writes_a_profile_and_says_what_it_has_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "refined.yaml"
    refining.main(["--report", str(RUN), "--profile", "local", "--out", str(out)])
    said = capsys.readouterr().out
    assert "same decisions, before" in said and "same decisions, after" in said
    assert "it is not recorded who decided" in said
    assert load_profile(out).hash == profile_hash(str(out))
    assert load_profile(out).jobs != load_profile("local").jobs


def test_a_checkpoint_goes_on_learning_on_the_new_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, policy = tmp_path / "refined.yaml", tmp_path / "policy.zip"
    recipe = refining.load_recipe(refining.RECIPE)
    short = {"steps": 1, "n_envs": 32, "n_steps": 8, "batch_size": 64, "selection_episodes": 1}
    monkeypatch.setattr(refining, "load_recipe", lambda name: recipe.model_copy(update=short))
    run = in_the_present_form(tmp_path)
    options = ["--report", str(run), "--profile", "local", "--out", str(out)]
    refining.main([*options, "--checkpoint", CHECKPOINT, "--out-checkpoint", str(policy)])
    learned = read_checkpoint(policy)
    learned.require_scenario(read_live_run(run).scenario)
    assert learned.metadata["profile"]["hash"] == load_profile(out).hash


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--report", "nowhere"], "no run's report folder"),
        (["--profile", "nothing"], "unknown profile"),
        (["--checkpoint", CHECKPOINT], "belong together"),
        (["--checkpoint", "none.zip", "--out-checkpoint", "new.zip"], "no such checkpoint"),
        (["--checkpoint", "best.zip", "--out-checkpoint", "new.zip"], "made for scenario"),
        (["--out", "/proc/refined.yaml"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    why: str,
) -> None:
    monkeypatch.setattr(refining, "refine", lambda *given: pytest.fail("got this far"))
    given = {"--report": str(RUN), "--profile": "local", "--out": str(tmp_path / "refined.yaml")}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    if "--out-checkpoint" in given:
        given["--out-checkpoint"] = str(tmp_path / given["--out-checkpoint"])
    with pytest.raises(SystemExit) as stop:
        refining.main([word for pair in given.items() for word in pair])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert why in said and len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_profile_without_a_job_of_the_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load((PROFILE_FOLDER / "local.yaml").read_text(encoding="utf-8"))
    del content["jobs"]["tree"], content["hash"]
    (tmp_path / "less.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    options = ["--report", str(RUN), "--profile", str(tmp_path / "less.yaml")]
    with pytest.raises(SystemExit) as stop:
        refining.main([*options, "--out", str(tmp_path / "refined.yaml")])
    assert stop.value.code == 2
    assert "no job tree" in capsys.readouterr().err
