"""A GPU that is not there: tensors with a shape and a device, and no data."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@cache
def _knows_grouped_products() -> bool:
    """Older versions of torch compute them in float32 on a GPU, but know their shape in bfloat16 alone."""
    x, weight, end = ((4, 16), torch.float32), ((2, 16, 16), torch.float32), ((2,), torch.int32)
    made = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in (x, weight, end)]
    try:
        F.grouped_mm(made[0], made[1], offs=made[2])
    except RuntimeError:
        return False
    return True


@contextmanager
def fake_cuda(model: nn.Module, *, may_wait: bool = False):
    """Moves ``model`` to a fake GPU; within the block all tensors are fake, and mixing devices is an error.

    Whatever waits for the GPU to know a value or a number of rows raises, unless it ``may_wait``: then the number is an
    unknown one.
    """
    if not _knows_grouped_products():
        pytest.skip("needs a torch that knows the shape of grouped products in float32")
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
