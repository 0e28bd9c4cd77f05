"""The tests of `agents/`."""
