"""Where the memcached with a proxy comes from; its build itself is `make memcached-proxy`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.engines.proxy_build import build, find_proxy
from env.errors import InputError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it, on a machine with no programs."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "coretide-memcached"


def test_the_newest_build_is_taken(cache: Path) -> None:
    for version in ("1.6.38", "1.6.9"):
        (cache / version).mkdir(parents=True)
        (cache / version / "memcached").touch()
    assert find_proxy() == cache / "1.6.38" / "memcached"
    assert build() == find_proxy(), "what is there is not built again"


@pytest.mark.parametrize("fault", ["link", "open", "another's"])
def test_a_build_that_others_had_a_hand_in_is_none(cache: Path, fault: str) -> None:
    program = cache / "1.6.38" / "memcached"
    program.parent.mkdir(parents=True)
    program.touch()
    if fault == "link":
        program.unlink()
        program.symlink_to("/etc/passwd")
    elif fault == "open":
        program.parent.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(program, 12345, 12345)
    else:
        pytest.skip("only root can give a file away")
    with pytest.raises(InputError, match="make memcached-proxy"):
        find_proxy()


def test_without_one_the_message_says_how_to_get_it(cache: Path) -> None:
    with pytest.raises(InputError, match="make memcached-proxy"):
        find_proxy()


def test_a_build_without_its_tools_names_the_package(cache: Path) -> None:
    with pytest.raises(InputError, match="apt-get: not found; install it: apt-get install apt"):
        build()
