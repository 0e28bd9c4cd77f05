"""The tests of `deploy/load/`."""
