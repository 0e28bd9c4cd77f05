"""The tests of `training/calibration/logs/`."""
