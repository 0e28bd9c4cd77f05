"""
Does the simulator predict this machine, and what does a run on it teach the simulator?

A deployment's records, played again with the decisions that were taken and with the policy free;
and a profile whose parameters are moved to where those records are most probable.
"""
