"""How figures look. Reads frames, never files, and never trains anything."""

from energylab.plotting.style import VENUES, VenueFigure, recursion_colour, save, style, variant_styles

__all__ = ["VENUES", "VenueFigure", "recursion_colour", "save", "style", "variant_styles"]
