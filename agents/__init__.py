"""Who decides: policies, from reference controllers to PPO."""
