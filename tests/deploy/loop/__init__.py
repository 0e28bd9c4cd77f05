"""The tests of `deploy/loop/`."""
