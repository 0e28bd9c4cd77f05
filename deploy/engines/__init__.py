"""
What does coretide start for itself where none runs?

memcached, Docker's daemon and the image of the jobs. The demo, the tests and the measurements
share them.
"""
