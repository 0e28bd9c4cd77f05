"""
What does the kernel offer?

Control groups, threads and their affinities, schedstat and perf counters, real-time priority, and
helper processes.
Nothing here knows of policies or deployments.
"""
