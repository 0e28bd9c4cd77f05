"""The tests of `deploy/safety/`."""
