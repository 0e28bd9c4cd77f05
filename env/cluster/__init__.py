"""
Which nodes does a cluster have, and what does a plan say of each job?

Node types, a service and jobs as a scenario describes them, and plans that place them.
"""
