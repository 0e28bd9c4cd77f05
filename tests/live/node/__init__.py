"""A cluster's node, tended beside what a kubelet does."""
