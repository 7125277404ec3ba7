"""energylab: a synthetic-data energy landscape laboratory for Causal Energy Minimization (arXiv 2605.07588)."""

__version__ = "0.1.0"
