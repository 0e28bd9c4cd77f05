"""
How do several memcacheds serve as one?

Members that hold the keys, and a proxy in front of them that clients talk to.
"""
