"""
Who decides?

The policy protocol, policies by name, reference controllers and the trained policies.
"""

from agents.parameter_files import names
from agents.policy import Policy
from agents.registry import make, warn

__all__ = ["Policy", "make", "names", "warn"]
