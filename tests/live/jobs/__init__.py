"""Jobs under a real actuator."""
