"""The tests of `env/physics/`."""
