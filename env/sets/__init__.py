"""
What does any scenario look like to one network?

Its hosts, services, vCPUs and jobs as sets of tokens, and edits by the tokens that they name.
"""
