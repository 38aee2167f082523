"""CLIP's other offspring in the paper's tables."""
