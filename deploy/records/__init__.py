"""
What does a run write down, and who reads it?

Event log, samples, state and proofs; from them the live view, the metrics and the report.
"""
