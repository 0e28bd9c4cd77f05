"""The tests of `deploy/queue/`."""
