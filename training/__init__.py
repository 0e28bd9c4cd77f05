"""How policies are made: training, evaluation, calibration and validation."""
