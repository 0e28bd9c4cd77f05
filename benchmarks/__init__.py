"""
What does it cost, what is each part worth, and what breaks it?

Speed of simulator, training, decisions and the live loop, experiments beside real programs, and
fuzzing. A benchmark may import anything, and nothing imports one.
"""
