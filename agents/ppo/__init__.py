"""
What does the trained network decide?

Its layers and the policy around them, with NumPy alone, so that the live loop needs neither
torch nor gymnasium.
"""
