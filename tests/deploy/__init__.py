"""The tests of `deploy/`."""
