"""
What do the public logs say?

Tables are read and checked, what is known to be wrong in them is corrected or left out with its
reason, and each run becomes a trace: load, memcached's moves and jobs.
"""
