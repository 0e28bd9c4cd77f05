"""
What happens over time on a simulated machine?

mcperf's exact load, a host that goes from event to event at the rates of `env.physics`,
episodes of one machine and of thousands, and the fitted profiles with their parameters.
"""
