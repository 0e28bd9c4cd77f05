"""The tests of `env/inputs/`."""
