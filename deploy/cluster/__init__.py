"""
How does a plan run on a Kubernetes cluster?

Who runs where is in the plan; here it is what is created when, what has become of it, and what is
left behind.
"""
