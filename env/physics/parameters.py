"""
Parameters of the physics: each is defined once, as a named column of an array.

numba takes a column's index as a constant, profiles take its name from the list of its array.
Memcached's parameters are defined in `env.physics.service`, those of the batch jobs and of the
machine here.
"""


def column(fields: list[str], name: str) -> int:
    """
    Define a parameter as the next column of an array.

    :param fields: names of the array's columns so far, receives the new one
    :param name: what profiles call the parameter
    :return: its index in the array
    """
    fields.append(name)
    return len(fields) - 1


JOB_FIELDS: list[str] = []
"""The parameters of one job."""

# [s] Run time alone, one thread, no neighbour.
WORK_S = column(JOB_FIELDS, "work_s")
# Part of that which only one thread can do.
SERIAL_FRACTION = column(JOB_FIELDS, "serial_fraction")
# [vCPUs] What one thread keeps busy: pipelines run more threads than they are told.
CORES_PER_THREAD = column(JOB_FIELDS, "cores_per_thread")
# Speed of a vCPU whose sibling is busy, relative to an idle sibling.
SMT = column(JOB_FIELDS, "smt")
# Slow-down per unit of the others' memory pressure.
SENSITIVITY = column(JOB_FIELDS, "sensitivity")
# [1/vCPU] Memory pressure per vCPU in use; canneal is 1 by definition.
PRESSURE = column(JOB_FIELDS, "pressure")
# [s] Container start, unpacking and end detection.
LAUNCH_OVERHEAD_S = column(JOB_FIELDS, "launch_overhead_s")

REQUIRED_JOB_FIELDS = tuple(JOB_FIELDS)
"""What a profile says of each of its jobs; the next ones it may lack."""

# How much longer work takes on a vCPU of memcached's or of a load generator's, per share of that
# vCPU that those take.
INTERRUPTION = column(JOB_FIELDS, "interruption")

OPTIONAL_JOB_FIELDS = tuple(JOB_FIELDS[INTERRUPTION:])
"""They are 0 where a profile lacks them, as those of public runs do, which cannot tell them."""


HOST_FIELDS: list[str] = []
"""The VM and its control paths."""

# Memory pressure of one busy memcached vCPU; canneal's vCPU is 1.
SERVICE_PRESSURE = column(HOST_FIELDS, "service_pressure")
# The VM's batch speed relative to the profile's.
JOB_SPEED = column(HOST_FIELDS, "job_speed")
# How much of its sibling a vCPU that serves memcached takes, per unit of occupancy: interrupts and
# wake-ups cost the sibling more than the requests' own time.
SERVICE_SIBLING = column(HOST_FIELDS, "service_sibling")
# How far a job waits for its slowest thread: 0 shares work freely, 1 goes at that one's pace.
STRAGGLING = column(HOST_FIELDS, "straggling")
# [s] The load and its intervals are this late against the log's clock.
LOAD_LAG_LOW_S = column(HOST_FIELDS, "load_lag_low_s")
LOAD_LAG_HIGH_S = column(HOST_FIELDS, "load_lag_high_s")
# [s] A call to Docker: create, pause, resume.
API_LATENCY_MEDIAN_S = column(HOST_FIELDS, "api_latency_median_s")
API_LATENCY_P90_S = column(HOST_FIELDS, "api_latency_p90_s")
API_LATENCY_P99_S = column(HOST_FIELDS, "api_latency_p99_s")
# [s] Writing cpuset and weight files, and memcached's vCPUs.
FAST_LATENCY_S = column(HOST_FIELDS, "fast_latency_s")
# [s] What a container takes to start, beyond its call.
CONTAINER_START_S = column(HOST_FIELDS, "container_start_s")
# [s] Work that a job loses when its cpuset changes.
MIGRATION_COST_S = column(HOST_FIELDS, "migration_cost_s")
# [s] Work that a job loses to cold caches after a pause.
RESUME_COST_S = column(HOST_FIELDS, "resume_cost_s")
# Relative standard deviation of a polling window's CPU or request reading, on top of counting
# noise.
SENSOR_NOISE = column(HOST_FIELDS, "sensor_noise")
# [1/s] How often the clients stop sending for a moment, and then catch up.
STALLS_PER_S = column(HOST_FIELDS, "stalls_per_s")
# [s] Mean length of such a stall.
STALL_S = column(HOST_FIELDS, "stall_s")
# [1/s] How often the host takes all vCPUs away for a moment.
STEALS_PER_S = column(HOST_FIELDS, "steals_per_s")
# [s] Mean length of that.
STEAL_S = column(HOST_FIELDS, "steal_s")
# [s] From the decision to start a job to its running, where its container waits at a gate.
GATE_LATENCY_S = column(HOST_FIELDS, "gate_latency_s")

OPTIONAL_HOST_FIELDS = tuple(HOST_FIELDS[STALLS_PER_S:])
"""A profile may lack these; they are 0 then, so that nothing of the kind happens."""


COST_FIELDS: list[str] = []
"""What requests cost in CPU time, where that was measured."""

# Memcached's CPU time goes with (load / capacity) to this power.
SERVICE_EXPONENT = column(COST_FIELDS, "service_exponent")
# [vCPUs] What the load generator takes at the load that one vCPU serves.
CLIENT_CPU = column(COST_FIELDS, "client_cpu")
# That goes with load / what one vCPU serves to this power.
CLIENT_EXPONENT = column(COST_FIELDS, "client_exponent")

# [vCPUs] What a deployment's loop and latency probe take of the load generator's vCPU.
AGENT_CPU = column(COST_FIELDS, "agent_cpu")

NEUTRAL_COSTS = (1.0, 0.0, 1.0, 0.0)
"""
Their values where nothing was measured: requests cost the same each, and nothing to a load
generator, which runs on other machines.
"""
