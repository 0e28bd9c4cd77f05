"""What the world is: scenarios, telemetry, allocations and the environment."""
