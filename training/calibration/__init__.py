"""
What do measured runs say of a kind of VM?

Tables are read and checked, parameters fitted to them with their spread, and runs replayed in
the simulator to see how far it can be believed.
"""
