"""
One way to compile the simulator, with a cache that edited physics cannot outlive.

numba's own cache looks at the file of the function it compiles, not at the functions that
are inlined from other modules, so a stale kernel could go on paying an old reward. The cache
folder is therefore named after a fingerprint of every source file of `env`, and of those of
`training` that have kernels of their own.
"""

import atexit
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import types
from numba.core.caching import IndexDataCacheFile
from numba.extending import register_jitable

PROJECT = Path(__file__).resolve().parents[2]


def source_fingerprint(project: Path = PROJECT) -> str:
    """
    Digest of the names and contents of all Python files that kernels may be made of.

    Those are all of `env`, and of `training` those that import numba or something `compiled`.

    :param project: the folder of `env` and `training`
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted([*project.glob("env/**/*.py"), *project.glob("training/**/*.py")]):
        name, content = path.relative_to(project), path.read_bytes()
        if name.parts[0] == "env" or b"import numba" in content or b"compiled import" in content:
            digest.update(str(name).encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where compiled kernels of exactly these sources are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "coretide" / source_fingerprint()


def usable_cache_folder() -> Path:
    """
    `cache_folder`, or where that cannot be used one that is gone with this process.

    Whoever writes to it has code of theirs run, so nobody else may. What this process starts uses
    the same one.
    """
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError("somebody else may write to it")
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # a user without a home
        base = tempfile.mkdtemp(prefix="coretide-cache-")
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = base
    print(
        "coretide: compiled code cannot be kept: set XDG_CACHE_HOME to a folder of yours; "
        f"{base} is used for now",
        file=sys.stderr,
    )
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True)  # as what this process starts wants it
    return folder


numba.config.CACHE_DIR = str(usable_cache_folder())  # type: ignore[attr-defined]


def _mangling_args(record: types.Record) -> tuple[str, tuple[str]]:
    """What names a record type in the symbols of compiled functions: a digest of its layout."""
    return "Record", (hashlib.sha256(record.name.encode()).hexdigest(),)


# numba numbers record types as they come, so kernels of two scenarios that were compiled by two
# processes could have the same symbols, and who loaded both from the cache ran one of them twice.
# By setattr, because mypy takes a plain assignment to a class's property for a mistake.
setattr(types.Record, "mangling_args", property(_mangling_args))  # noqa: B010


def _one_process_at_a_time(save: Callable[..., None]) -> Callable[..., None]:
    """
    Hold a lock of the cache folder while an entry is added to a kernel's index.

    numba reads the index, adds an entry and writes it back. Two processes that did so at once took
    one file name: an entry was lost, or what was kept for one kernel held the code of another.
    """

    @functools.wraps(save)
    def locked(cache: Any, key: Any, data: Any) -> None:
        with Path(cache._cache_path, "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save(cache, key, data)

    return locked


setattr(IndexDataCacheFile, "save", _one_process_at_a_time(IndexDataCacheFile.save))  # noqa: B010


_OPTIONS: dict[str, Any] = {"error_model": "numpy", "cache": True, "nogil": True}
# Said either way: numba passes `forceinline` on to whatever a function is the first to call.
_UNCOUNTED = _OPTIONS | {"_nrt": False, "forceinline": False}


def compiled(function: Callable[..., Any]) -> Any:
    """
    Compile a scalar function; division by zero follows IEEE 754, as NumPy's does.

    It works on arrays that it is given and can make none: numba's reference counts, which each look
    at an array would cost, are off.

    :param function: a function of numbers, arrays and host rows
    """
    return numba.njit(**_UNCOUNTED)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """
    `compiled` into its callers, with the plain functions that it calls.

    A call would pass every array as seven numbers and hide what is constant, such as its length.

    :param function: a function of numbers, arrays and host rows
    """
    return numba.njit(**_UNCOUNTED | {"forceinline": True})(function)


def allocating(function: Callable[..., Any]) -> Any:
    """
    `compiled`, for a function that makes arrays.

    :param function: a function of numbers and arrays
    """
    return numba.njit(**_OPTIONS)(function)


def callable_from_kernel(*functions: Callable[..., Any]) -> None:
    """
    Let compiled code call plain functions that the live loop runs uncompiled.

    The functions stay what they are, so that the live agent never imports numba.

    :param functions: functions of numbers
    """
    for function in functions:
        register_jitable(function)
