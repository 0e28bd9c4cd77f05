"""
How is one network trained for any scenario?

Its attention over tokens, the machines of many scenarios side by side, what lists come to on copies
of them, and PPO.
"""
