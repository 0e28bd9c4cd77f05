"""
Which scenarios could there be?

A family of hosts, services, loads and jobs, drawn by name: `family-<purpose>-<seed>-<index>` names
one, wherever a scenario's or a profile's name is asked for.
"""
