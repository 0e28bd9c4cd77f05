"""Whatever ends a command, and whenever, the machine is as it was found."""
