"""The tests of `env/`."""
