"""Where a command writes: a folder that cannot be had is named before any work is done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import train
from env.errors import InputError
from env.inputs.commandline import require_folder
from env.physics.compiled import cache_folder

ROOT = Path(__file__).resolve().parents[3]


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    require_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below", "\0"])
def test_a_folder_that_cannot_be_had_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written to"):
        require_folder(tmp_path / place)


def test_training_says_so_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        train.main(["--out", str(tmp_path / "file" / "run")])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("where", ["no folder", "others may write", "another's"])
def test_compiled_code_is_kept_in_a_folder_of_ours_or_for_now(tmp_path: Path, where: str) -> None:
    """numba unpickles what it finds there: who writes to it has us run their code."""
    cache = tmp_path / "cache"
    if where == "no folder":
        cache.touch()
    else:
        kept = cache / "coretide" / cache_folder().name
        kept.mkdir(parents=True)
        if where == "another's":
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder away")
            os.chown(kept, 12345, 12345)
        else:
            kept.chmod(0o777)
    imports = "import env.physics.service"
    started = f"{imports}, subprocess, sys; subprocess.run([sys.executable, '-c', {imports!r}])"
    done = subprocess.run(
        [sys.executable, "-c", started],
        cwd=ROOT,
        umask=0o002,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    (said,) = done.stderr.splitlines()
    used = Path(said.split("; ")[1].split()[0])
    assert "XDG_CACHE_HOME" in said and used.is_absolute() and not used.exists()
