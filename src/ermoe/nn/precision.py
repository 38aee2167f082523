"""What stays in full precision under autocast: scores, choices and weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(x: Tensor) -> AbstractContextManager[None]:
    """Switches autocast off for the device of ``x``; in a traced graph too, which may meet it later."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and (torch.compiler.is_compiling() or torch.is_autocast_enabled(kind)):
        off: AbstractContextManager[None] = torch.autocast(kind, enabled=False)
        return off
    return nullcontext()


def widen(x: Tensor) -> Tensor:
    """``x`` in float32, or in its own precision if that is higher."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def widest(device: torch.device) -> torch.dtype:
    """float64, but Apple's GPUs know nothing wider than float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def double(x: Tensor) -> Tensor:
    """``x`` in float64, on the CPU where its own device has none."""
    return (x if widest(x.device) == torch.float64 else x.cpu()).double()
