"""The tests of `training/general/`."""
