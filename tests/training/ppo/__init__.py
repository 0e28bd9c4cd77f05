"""The tests of `training/ppo/`."""
