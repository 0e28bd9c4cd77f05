"""
Makes `gymnasium.make` find the environments; import it, or name it as a module prefix.

    gymnasium.make("env.registration:coretide/Colocation-v0", scenario="cca-2025")
"""

import gymnasium

gymnasium.register(
    id="coretide/Colocation-v0",
    entry_point="env.colocation:ColocationEnv",
)
