"""
Libraries that a deployment does without, though others import them where they are there.

Docker is spoken to at a socket of this machine, and what is hashed are profiles and a checkpoint:
OpenSSL, which Python's `ssl`, `hashlib` and `hmac` load, would take 5 of the loop's 70 MiB.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from types import ModuleType

OWN_DIGESTS = (("_md5",), ("_sha1",), ("_sha256", "_sha2"), ("_sha3",), ("_blake2",))
"""
Python's own digests; SHA-256 was a module of its own up to 3.11. Some distributions leave all or
most of them to OpenSSL.
"""


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """
    Import others as if some modules were not installed; who asks for them later gets them.

    :param names: the modules; what is imported already stays
    """
    spared = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(spared, cast("ModuleType", None)))
    try:
        yield
    finally:
        for name in spared:
            sys.modules.pop(name, None)


def has_own_digests() -> bool:
    """Whether this Python can do what `hashlib` promises without OpenSSL."""
    return all(any(map(importlib.util.find_spec, names)) for names in OWN_DIGESTS)


def import_digests() -> None:
    """Make `hashlib` and `hmac` use Python's own digests, before anybody else imports them."""
    if has_own_digests():
        with without("_hashlib"):
            for name in ("hashlib", "hmac"):
                importlib.import_module(name)
