"""Synthetic ageing brains. Their age effects are designed in: for tests and tutorials, never as evidence."""

from ermoe.brain.data.phantom.dataset import synthesize

__all__ = ["synthesize"]
