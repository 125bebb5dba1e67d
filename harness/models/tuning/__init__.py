"""Thresholds of block-sparse attention for each layer and head of a model: found, saved, loaded and put to use."""
