"""Who decides: the policy protocol, reference controllers and PPO inference."""

from agents.policy import Policy
from agents.registry import make, names, warn

__all__ = ["Policy", "make", "names", "warn"]
