"""
How are policies made and judged?

Recipes and the commands at this level; what stands behind the commands is in the folders.
"""
