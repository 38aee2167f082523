"""Synthetic ageing brains. Their age effects are designed in: for tests and tutorials, never as evidence."""

from ermoe.data.brain.phantom.dataset import synthesize

__all__ = ["synthesize"]
