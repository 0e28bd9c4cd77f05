"""
What keeps the machine safe when something dies?

The guardian, the fallback that decides without a policy, systemd's watchdog, and undoing. The
guardian imports the standard library only, so this file imports nothing.
"""
