"""What PPO adds: who is compared with whom, and what the comparison says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3.common.logger import configure

from benchmarks.ppo_part import AFTER, CURVE, FITTED, SCRATCH, Played, Trained, main, report

GENERAL = Path("checkpoints/general.zip").resolve()
ARRIVE = np.array([False, False, True])


def played(*seconds: float, violations: float = 0.0) -> Played:
    return Played(np.array(seconds), np.full(len(seconds), violations))


def test_a_network_is_compared_with_itself_before_ppo_and_one_from_scratch_with_all_fitted() -> (
    None
):
    first, second, scratch = Path("first"), Path("second"), Path("scratch")
    found = report(
        {
            Trained(first, FITTED): played(10.0, 20.0, 8.0),
            Trained(first, AFTER): played(9.0, 18.0, 4.0, violations=0.01),
            Trained(second, FITTED): played(40.0, 80.0, 8.0),
            Trained(second, AFTER): played(20.0, np.nan, 8.0, violations=0.03),
            Trained(scratch, SCRATCH): played(20.0, 40.0, 16.0),
        },
        ARRIVE,
    )
    after = found[AFTER]
    assert after["runs"]["first"]["makespan"]["geomean"] == pytest.approx(0.9)
    assert after["runs"]["first"]["jct"]["geomean"] == pytest.approx(0.5)
    # The scenario that was not done does not count.
    assert after["runs"]["second"]["makespan"]["geomean"] == pytest.approx(0.5)
    assert after["makespan"]["geomean"] == pytest.approx((0.9 * 0.5) ** 0.5)
    assert after["violations"]["mean"] == pytest.approx(0.02)
    # Fitted networks took 20, 40 and 8 seconds, in the geometric mean.
    assert found[SCRATCH]["makespan"]["geomean"] == pytest.approx(1.0)
    assert found[SCRATCH]["jct"]["geomean"] == pytest.approx(2.0)


def test_runs_are_played_compared_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted, scratch = tmp_path / "fitted", tmp_path / "scratch"
    for run, names in ((fitted, ("fitted", "best")), (scratch, ("best",))):
        run.mkdir()
        for name in names:
            shutil.copy(GENERAL, run / f"{name}.zip")
        logger = configure(str(run / "tensorboard"), ["tensorboard"])
        for step in (0, 800):
            logger.record(CURVE, 1.5 - step / 1600)
            logger.dump(step)
        logger.close()
    figures, picture = tmp_path / "ppo.json", tmp_path / "curves.png"
    options = ["--family", "2", "--json", str(figures), "--plot", str(picture)]
    main([str(fitted), str(scratch), *options])
    said = capsys.readouterr().out
    assert f"{fitted}: makespan 1.000, jct 1.000, violated +0.00 +- 0.00 points" in said
    content = json.loads(figures.read_text(encoding="utf-8"))
    of_run = content["stages"][SCRATCH]["runs"][str(scratch)]
    assert of_run["makespan"]["geomean"] == pytest.approx(1.0)  # all are the same network
    assert content["curves"][str(fitted)] == {"lists": [0, 800], "over_baseline": [1.5, 1.0]}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_fitted_network_there_is_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(GENERAL, tmp_path / "best.zip")
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path)])
    assert end.value.code == 2
    assert "none has fitted.zip" in capsys.readouterr().err
