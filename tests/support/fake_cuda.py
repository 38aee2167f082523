"""A GPU that is not there: tensors with a shape and a device, and no data."""

from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextmanager
def fake_cuda(model: nn.Module, *, may_wait: bool = False):
    """Moves ``model`` to a fake GPU; within the block all tensors are fake, and mixing devices is an error.

    Whatever waits for the GPU to know a value or a number of rows raises, unless it ``may_wait``: then the number is an
    unknown one.
    """
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True) if may_wait else None
    mode = FakeTensorMode(shape_env=shapes)
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        mode.allow_non_fake_inputs = True
        with mode:
            model.to("cuda")
        mode.allow_non_fake_inputs = False
        with mode, torch.no_grad():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
