"""
Which plan for a cluster is best?

How long one takes by the simulator, how sure that is, the search for a better one, and how it is
shown.
"""
