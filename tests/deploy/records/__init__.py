"""The tests of `deploy/records/`."""
