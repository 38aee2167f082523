"""Backbones: making dense ones sparse, building sparse ones, and their weights."""
