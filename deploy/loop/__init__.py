"""
Who decides and acts while a deployment runs?

The loop, the machine as a policy sees it, the actuator that makes it hold an allocation, and
how it all ended.
"""
