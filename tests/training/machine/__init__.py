"""The tests of `training/machine/`."""
