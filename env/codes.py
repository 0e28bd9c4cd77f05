"""
What the numbers in the arrays mean: states, weights, edits and ends.

They are plain ints: compiled code takes them as constants, arrays hold them, and plain Python
compares them faster than members of an enum. `env.allocation` names states and weights as enums.
"""

# Where a job stands; a container that is still starting is running. A job that has not arrived is
# one that nobody on the machine knows of yet.
PENDING, RUNNING, PAUSED, DONE, NOT_ARRIVED = 0, 1, 2, 3, 4

# CPU weight: background yields to everything else, normal equals memcached's.
BACKGROUND, NORMAL = 0, 1

# What an edit does.
KEEP, SERVICE, START, PLACE, PAUSE = 0, 1, 2, 3, 4

# How an episode ended: all jobs are done, or it was cut off. 0 while it goes on.
TERMINATED, TRUNCATED = 1, 2

# What holds a host up for a moment: the clients send nothing, or the host takes the vCPUs away.
STALL, STEAL = 1, 2
