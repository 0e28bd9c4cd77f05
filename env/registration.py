"""
Makes `gymnasium.make` find the environments; import it, or name it as a module prefix.

    gymnasium.make("env.registration:coretide/Colocation-v0", scenario="cca-2025")
    gymnasium.make("env.registration:coretide/Family-v0")
    gymnasium.make("env.registration:coretide/ColocationVM-v0", scenario="local", runtime="process")

The second one is another drawn scenario in each episode, the third this machine itself. Their entry
points are only named here, and imported when the environment is made.
"""

import gymnasium

gymnasium.register(
    id="coretide/Colocation-v0",
    entry_point="env.colocation:ColocationEnv",
)

gymnasium.register(
    id="coretide/Family-v0",
    entry_point="env.sets.family_env:FamilyEnv",
)

gymnasium.register(
    id="coretide/ColocationVM-v0",
    entry_point="training.ppo.live_training:live_environment",
    nondeterministic=True,
)
