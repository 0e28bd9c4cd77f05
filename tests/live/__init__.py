"""The live side against real engines: memcached, stress-ng, control groups, Docker."""
