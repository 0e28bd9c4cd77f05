"""The tests of `env/sets/`."""
