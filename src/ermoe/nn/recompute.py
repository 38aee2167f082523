"""Telling a first forward pass from the one that activation checkpointing repeats."""

from __future__ import annotations

import torch


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, so that what it sees has been counted before.

    Activation checkpointing, in both of its forms, repeats a forward from within the backward engine, which gives
    every running graph an id. A traced graph has no such repetition to detect: its recomputation is planned by the
    compiler, which never replays a mutation.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)
