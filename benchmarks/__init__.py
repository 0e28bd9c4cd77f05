"""How fast it is: measured speed of the simulator, training and decisions."""
