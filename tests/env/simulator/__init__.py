"""The tests of `env/simulator/`."""
