"""The tests of `deploy/linux/`."""
