"""
What is the world?

Scenarios, telemetry, allocations, the regulator, and observation, action and reward as the
simulator, the Gymnasium environment and the live loop share them. `env` imports nothing else.
"""
