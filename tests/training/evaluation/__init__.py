"""The tests of `training/evaluation/`."""
