"""A queue served beside memcached, with real processes and containers."""
