"""
How fast do things go at given vCPUs, threads and neighbours?

How memcached answers and how fast batch jobs run: equations without time or decisions, each a
plain scalar function that numba compiles. The simulator and the fits call the same ones.
"""
