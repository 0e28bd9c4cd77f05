"""
What does the kernel offer?

Control groups, threads and their affinities, schedstat and perf counters, real-time priority.
Nothing here knows of policies or deployments.
"""
