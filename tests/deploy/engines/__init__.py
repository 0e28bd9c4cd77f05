"""The tests of `deploy/engines/`."""
