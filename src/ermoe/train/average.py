"""The exponential average of a model's weights, which is what gets evaluated and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ermoe.nn import retract
from ermoe.nn.sharding import whole


class Average:
    """Averages of all parameters and floating-point buffers of a model, offsets included.

    Early on the decay is lower, (1 + n) / (10 + n) after n updates, so that short runs do not average in their start.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.num_updates = 0
        self._shadow = {name: tensor.detach().clone() for name, tensor in _averaged(model).items()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the model as it is after a step."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, tensor in _averaged(self.model).items():
            _local(self._shadow[name]).lerp_(_local(tensor), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the averaged weights, with its bases made orthonormal.

        An average of orthonormal bases is shorter than one; the average itself goes on from where it was.
        """
        own = {name: tensor.detach().clone() for name, tensor in _averaged(self.model).items()}
        self._put(self._shadow)
        retract(self.model)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, tensor in _averaged(self.model).items():
            _local(tensor).copy_(_local(values[name]))

    def state_dict(self) -> dict[str, Tensor | int]:
        """Whole tensors, also where the model is sharded; collective in that case."""
        return {"num_updates": self.num_updates, **{f"shadow.{n}": whole(t).cpu() for n, t in self._shadow.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Takes it back, sharded as the model is now."""
        self.num_updates = int(state["num_updates"])
        for name, tensor in self._shadow.items():
            saved = state[f"shadow.{name}"]
            assert isinstance(saved, Tensor)
            if isinstance(tensor, DTensor):
                saved = distribute_tensor(saved.to(tensor.device), tensor.device_mesh, tensor.placements)
            _local(tensor).copy_(_local(saved))


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that are saved with them. The others are constants: a mask of −∞ has no average."""
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point() and name not in module._non_persistent_buffers_set
    }
    return {**dict(model.named_parameters()), **buffers}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
