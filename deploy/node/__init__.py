"""
How is a node of a Kubernetes cluster tended, whose pods its kubelet starts?

Which pods are the service and the batch jobs, where their control groups are, how batch pods become
jobs of the loop, and how they are left as they were found.
"""
