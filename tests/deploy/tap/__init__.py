"""The tests of `deploy/tap/`."""
