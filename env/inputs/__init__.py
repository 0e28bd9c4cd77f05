"""
How is what a user gives read, and refused?

Command lines, text, JSON and YAML files: whatever is wrong ends in one line that names what, where
and what is allowed (`env.errors`).
"""
