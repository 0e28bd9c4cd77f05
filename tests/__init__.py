"""The tests of coretide."""
