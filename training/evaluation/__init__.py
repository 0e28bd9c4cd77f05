"""
How good is a policy?

Episodes in the simulator, their figures and pictures, policies side by side, published
controllers beside what was measured, and how far the best possible is.
"""
