"""How processes share a model: as copies, as shards, or with a part of the experts each.

| | experts of a layer | the rest |
|---|---|---|
| ddp | copies | copies |
| fsdp | shards of all processes | shards of all processes |
| ep | E / n on each of n processes, copies beside | copies |
| fsdp+ep | E / n on each of n processes, shards beside | shards of all processes |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ermoe.errors import UserError
from ermoe.nn.exchange import EXPERTS
from ermoe.nn.layer import moe_layers
from ermoe.nn.sharding import by_mesh, is_sharded, whole

PARALLEL = ("ddp", "fsdp", "ep", "fsdp+ep")
COPIES, SHARDS = "replicate", "efsdp"
"""Axes beside that of experts: processes that hold copies of one another's experts, or shards of the same ones."""


def parallelise(model: nn.Module, how: str, num_processes: int, *, expert_processes: int = 0) -> nn.Module:
    """The model as so many processes train it; alone, as it is."""
    if how not in PARALLEL:
        raise UserError(f"parallel={how!r}: use one of {', '.join(PARALLEL)}")
    if expert_processes and not how.endswith(EXPERTS):
        raise UserError(
            f"expert_processes={expert_processes} with parallel={how}: only ep and fsdp+ep share out experts"
        )
    if num_processes == 1:
        return model
    if how == "ddp":
        return _copied(model)
    device = next(model.parameters()).device.type
    if how == "fsdp":
        return _sharded(model, init_device_mesh(device, (num_processes,)))
    num = expert_processes or _most_processes(model, num_processes)
    if num < 1 or num_processes % num:
        raise UserError(
            f"expert_processes={num}: {num_processes} processes cannot be cut into groups of so many; use a divisor"
        )
    names = (COPIES if how == "ep" else SHARDS, EXPERTS)
    return distribute(model, init_device_mesh(device, (num_processes // num, num), mesh_dim_names=names))


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shares the experts of every layer out among processes, in place, and returns what is to be trained.

    Every process calls it with the same model, and afterwards trains on its own part of each batch. Layers with a
    single expert count as part of the rest.

    Args:
        model: sparse; experts lie on the axis "ep" of the mesh, E / n on each of its n processes.
        mesh: over all processes, with the axis "ep", the last one. Before it there may be "replicate", along which
            experts are copied, or "efsdp", along which they are sharded further. With "efsdp" the rest is sharded over
            all processes; otherwise every process has a copy, and what is returned is a `DistributedDataParallel`.

    ::

        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("efsdp", "ep"))
        network = ermoe.distribute(model, mesh)
    """
    _check_model(model)
    _check_mesh(model, mesh)
    # One collective for each axis of a mesh: torch advises against what is right for a few small tensors.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    names = mesh.mesh_dim_names or ()
    layers = [layer for layer in moe_layers(model).values() if layer.experts.num_experts > 1]
    held = mesh[EXPERTS] if SHARDS in names else mesh
    placements = [Shard(0) if name == EXPERTS else Replicate() for name in held.mesh_dim_names or ()]
    for layer in layers:
        for module in layer.experts.modules():
            for name, stacked in module.named_parameters(recurse=False):
                own = distribute_tensor(stacked.detach(), held, placements, src_data_rank=None)
                setattr(module, name, nn.Parameter(own, requires_grad=stacked.requires_grad))
    if SHARDS not in names:
        return _copied(model)
    for layer in layers:
        fully_shard(layer.experts, mesh=mesh[SHARDS])
    return _sharded(model, init_device_mesh(mesh.device_type, (mesh.size(),)))


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel) or any(map(is_sharded, model.parameters())):
        raise UserError("the model is shared out already: give ermoe.distribute the model as it was built, once")
    for name, layer in moe_layers(model).items():
        if layer.experts.is_adapted:
            raise UserError(
                f"the experts of {name} are wrapped in adapters, which cannot be shared out: merge them first, in peft "
                "with merge_and_unload, or use ddp"
            )


def _check_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise UserError(
            f"mesh={mesh!r}: need a DeviceMesh with the axis 'ep', as "
            "torch.distributed.init_device_mesh(device, (processes,), mesh_dim_names=('ep',)) makes it"
        )
    names = mesh.mesh_dim_names or ()
    if names[-1:] != (EXPERTS,) or names[:-1] not in ((), (COPIES,), (SHARDS,)):
        raise UserError(
            f"the mesh has the axes {names or 'without names'}: need 'ep' as the last, and before it nothing, "
            "'replicate' or 'efsdp'"
        )
    if mesh.size() != dist.get_world_size():
        raise UserError(f"the mesh has {mesh.size()} of {dist.get_world_size()} processes: build it over all of them")
    num = mesh[EXPERTS].size()
    counts = {name: layer.experts.num_experts for name, layer in moe_layers(model).items()}
    if not any(count > 1 for count in counts.values()):
        raise UserError("the model has no experts to share out: make it sparse with ermoe.upcycle, or use ddp or fsdp")
    for name, count in counts.items():
        if 1 < count < num:
            raise UserError(f"{name} has {count} experts for {num} processes: use at most {count} expert processes")
        if count > 1 and count % num:
            raise UserError(
                f"{name} has {count} experts, which {num} processes cannot share evenly: use a number of expert "
                f"processes that divides {count}"
            )


def _most_processes(model: nn.Module, num_processes: int) -> int:
    """The largest number of processes that divides all of them and the experts of every layer."""
    counts = [layer.experts.num_experts for layer in moe_layers(model).values()]
    most = math.gcd(num_processes, *(count for count in counts if count > 1))
    if most == 1:
        raise UserError(
            f"{num_processes} processes cannot share layers of {', '.join(map(str, sorted(set(counts))))} experts "
            "evenly: use a number of processes with a common divisor, or parallel=fsdp"
        )
    return most


def _copied(model: nn.Module) -> nn.Module:
    """Copies of everything that is not shared out, whose gradients are averaged."""
    apart = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, apart)
    device = next(model.parameters()).device
    # Rows travel while gradients are averaged: on one line, either would have to wait for the other's turn.
    line = cast(dist.ProcessGroup, dist.new_group()) if apart else None
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, process_group=line)


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every parameter sharded on its first axis, which is the axis of experts: a process holds whole bases.

    Single numbers, like the temperature of a loss, have no axis: every process has a copy.
    """
    numbers = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    for number in numbers:
        number.register_hook(lambda grad: all_reduce(grad, "sum", mesh) / mesh.size())
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, ignored_params=numbers)
    fully_shard(model, mesh=mesh, ignored_params=numbers)
    for parameter in model.parameters():
        if is_sharded(parameter):
            parameter.register_post_accumulate_grad_hook(_keep_own_gradient)
    return model


def _keep_own_gradient(parameter: Tensor) -> None:
    """Takes a gradient out of the one tensor in which FSDP hands out those of a module.

    Some bases have their penalty's gradient already, and FSDP adds to that. Any of the others, however small, would
    keep the whole tensor beside them.
    """
    gradient = parameter.grad
    if gradient is not None and is_sharded(gradient):
        own = gradient.to_local()
        if own.untyped_storage().nbytes() > own.nbytes:
            parameter.grad = gradient.clone()


def _blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The longest list of modules in a model: its transformer blocks."""
    lists = [list(m.children()) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return max(lists, key=len, default=[])


@contextmanager
def without_sync(network: nn.Module, *, unless: bool) -> Iterator[None]:
    """Keeps gradients in this process for a part of a batch that is not the last; ``unless`` it is."""
    network = getattr(network, "_orig_mod", network)  # what torch.compile wrapped
    if unless or not isinstance(network, DistributedDataParallel | FSDPModule):
        yield
    elif isinstance(network, DistributedDataParallel):
        with network.no_sync():
            yield
    else:
        network.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            network.set_requires_gradient_sync(True)


def reshard(model: nn.Module) -> None:
    """Frees the whole parameters that FSDP keeps after a forward pass in expectation of a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all of them together, the same on every process."""
    norms = [whole(nn.utils.get_total_norm(group)) for group in by_mesh(tensors)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Shortens the gradient of all parameters together to at most ``limit``; returns the norm it had."""
    learning = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = total_norm(parameter.grad for parameter in learning if parameter.grad is not None)
    for group in by_mesh(learning):
        nn.utils.clip_grads_with_norm_(group, limit, norm)
    return norm
