"""Seeing what a mixture of experts does: measures, recordings, plots, reports."""

from ermoe.analysis.recorder import RoutingRecorder, record_routing
from ermoe.analysis.summary import MEASURES, Summary

__all__ = [
    "MEASURES",
    "RoutingRecorder",
    "Summary",
    "record_routing",
]
