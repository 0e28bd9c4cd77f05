"""Jobs, neighbours and daemons that behave badly: the loop goes on, and memcached is served."""
