"""
How does a policy run on a real machine?

A deployment is put together and undone at this level, from the parts in the folders.
"""
