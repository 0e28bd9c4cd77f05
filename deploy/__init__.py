"""The live side: sensors, actuator, loop, event log and report."""
