"""
What can this machine do?

The report on what was measured, and a profile and a scenario fitted to it.
"""
