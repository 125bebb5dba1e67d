"""Attention over chosen blocks of queries x keys: a selector says which, the engine computes those exactly."""
