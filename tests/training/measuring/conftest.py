"""The scenario that the tests of a characterisation measure."""

from tests.training.machine.conftest import scenario

__all__ = ["scenario"]
