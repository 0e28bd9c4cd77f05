"""The tests of `training/imitation/`."""
