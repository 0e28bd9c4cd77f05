"""The tests of `training/`."""
