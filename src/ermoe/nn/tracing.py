"""Who runs a forward pass: Python itself, a tracer or compiler, a transformation of torch.func, the backward engine."""

from __future__ import annotations

import torch


def has_static_shapes() -> bool:
    """Whether shapes must not depend on data: in a traced graph, and where a tensor stands for many samples."""
    return torch.compiler.is_compiling() or is_transformed()


def is_transformed() -> bool:
    """Whether Python runs it under a transformation of torch.func: vmap, grad, jvp or one that is made of them."""
    return not torch.compiler.is_compiling() and bool(torch._C._are_functorch_transforms_active())


def is_for_onnx() -> bool:
    """Whether the graph is to become an ONNX file, which knows fewer operators than torch."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def is_any_number(size: int) -> bool:
    """Whether a graph is exported in which a size stands for any: dynamo, behind strict exports, does not tell."""
    is_symbol = isinstance(size, torch.SymInt) or torch.compiler.is_dynamo_compiling()
    return torch.compiler.is_exporting() and is_symbol


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, so that what it sees has been counted before.

    Activation checkpointing, in both of its forms, repeats a forward from within the backward engine, which gives
    every running graph an id. A traced graph has no such repetition to detect: its recomputation is planned by the
    compiler, which never replays a mutation.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)


def refuse_jit_trace() -> None:
    """A trace keeps the counts of the tokens it has seen, and would send others to the wrong experts without a word."""
    if torch.jit.is_tracing():
        raise ValueError(
            "torch.jit.trace would keep the routing of its example for all images: write the model with "
            "ermoe.export(model, 'model.onnx') or 'model.pt2'"
        )
