"""
How does a policy learn from reward?

One run of PPO from recipe to checkpoint, in the simulator or on this machine, with stock
Stable-Baselines3 or its fused twin.
"""
