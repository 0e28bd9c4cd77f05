"""
What do measured tables say, whoever measured them?

Latency curves, queueing models, factorial designs, the findings drawn from them and the page
that shows them.
"""
