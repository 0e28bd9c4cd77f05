"""The tests of `training/calibration/`."""
