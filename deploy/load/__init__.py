"""
What stands in for clients?

A load that jumps as mcperf's does and a latency probe, each a process of its own.
"""
