"""The simulated host: load, service, jobs and the compiled step."""
