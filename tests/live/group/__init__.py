"""Groups of memcacheds under a deployment."""
