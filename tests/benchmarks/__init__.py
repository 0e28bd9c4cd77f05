"""The tests of `benchmarks/`."""
