"""The tests of `deploy/node/`."""
