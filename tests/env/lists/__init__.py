"""The tests of `env/lists/`."""
