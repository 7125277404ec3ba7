"""Looking at trained models: their errors, their descent, and the statistics over seeds."""
