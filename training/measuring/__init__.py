"""
What does this machine do?

Rounds of measurements with real memcached, load and jobs, written to tables.
"""
