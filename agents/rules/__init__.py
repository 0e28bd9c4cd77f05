"""
What do published rules decide?

One rule a file, the two plain strategies in one, behind the protocol of `agents.policy`.
`agents.registry` finds them by name; their parameters are YAML files in `agents/parameters`.
"""
