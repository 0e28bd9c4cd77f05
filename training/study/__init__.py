"""
What does a group of memcacheds serve, how fast, and what limits it?

Plans of experiments, the points that they measure on this machine, and the report.
"""
