"""
Where does the time of memcached's real requests go?

The kernel's tracepoints on its sockets tell, read by bpftrace, a process of its own.
"""
