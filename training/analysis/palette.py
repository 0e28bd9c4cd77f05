"""The colours of all pictures."""

PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
