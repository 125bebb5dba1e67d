"""Real models whose attention can be swapped: one small file per family."""
