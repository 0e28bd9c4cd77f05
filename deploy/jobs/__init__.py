"""
How do batch jobs run on a real machine?

Attempts and retries, containers or plain processes, and where their vCPUs, weights and quotas
are written.
"""
