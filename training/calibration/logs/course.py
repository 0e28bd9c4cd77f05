"""The course's VM and editions, which the public logs are from."""

import numpy as np

VCPUS = 4
JOBS = ("blackscholes", "canneal", "dedup", "ferret", "freqmine", "radix", "vips")

SIBLINGS = np.array([1, 0, 3, 2], dtype=np.int64)
"""The vCPU that shares a core with each one, as memcached's latency shows it."""

BATCH_SIBLINGS = np.array([2, 3, 0, 1], dtype=np.int64)
"""The vCPU that shares a core with each one, as the batch jobs' durations show it."""

SERVERS = {2023: "n2d-highmem-4", 2024: "n2d-highmem-4", 2025: "n2-highmem-4"}
"""Machine type by year."""

DEFAULT_SLO_US = 800.0
SLO_US = {2023: 1000.0, 2024: 1000.0}
"""The p95 objective of those years that had another one than `DEFAULT_SLO_US`."""

LOAD_LAG_S = 0.05
"""
The load changes this long after the boundary that the log implies.

The groups' clocks differ: where a late second vCPU begins to break intervals says 0.1 to 0.2 s for
Soufiane-Barrada, ImaGoodFella's reactions say 0.4 to 0.7 s. From 0.1 to 0.55 s the fit is equally
good within 1 %.
"""
