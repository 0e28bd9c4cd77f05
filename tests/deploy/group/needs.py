"""What tests of groups need."""

import pytest

from deploy.group.group import programs_of
from env.errors import InputError


def _needs(proxy: str) -> pytest.MarkDecorator:
    missing = ""
    try:
        programs_of(proxy)
    except InputError as error:
        missing = str(error)
    return pytest.mark.skipif(bool(missing), reason=missing)


needs_proxy, needs_nutcracker = _needs("memcached"), _needs("nutcracker")
