"""The tests of `training/measuring/`."""
