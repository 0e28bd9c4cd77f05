"""
What can this machine do?

Measurements with real memcached, load and jobs, the report on them, and a profile and a
scenario fitted to them.
"""
