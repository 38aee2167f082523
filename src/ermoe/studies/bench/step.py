"""One step of training as a candidate: all that a step of a model needs, to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ermoe.nn import orthogonality_loss, update_balance
from ermoe.nn.rivals.losses import auxiliary_loss


def training_step_of(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    """Forward, backward, optimiser, penalty and balance on the next batch; retraction comes on top, now and then."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels) + 5e-5 * orthogonality_loss(model) + auxiliary_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_balance(model)
        torch.get_device_module(images.device).synchronize()

    return run
