"""The tests of `training/analysis/`."""
