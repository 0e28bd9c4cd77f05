"""
How does a network learn to follow a schedule?

Before it learns from reward: an expert, what it demonstrates, and the fit to that.
"""
