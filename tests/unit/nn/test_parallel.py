"""How processes share a model: what is refused before any of them begins."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ermoe
from ermoe.errors import UserError
from ermoe.nn.parallel import distribute, parallelise
from ermoe.nn.sharding import is_sharded, whole_copy


@pytest.fixture(autouse=True)
def _four_processes():
    """One process that believes to be one of four, and never waits for the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def model(num_experts):
    return nn.ModuleList([ermoe.EigenMoE(8, num_experts=num_experts, top_k=1, score="prototype")])


@pytest.mark.parametrize(
    ("num_experts", "sizes", "names", "sentence"),
    [
        (4, (2, 2), ("data", "ep"), r"the axes \('data', 'ep'\): need 'ep' as the last"),
        (4, (2, 2), ("ep", "efsdp"), "need 'ep' as the last"),
        (4, (4,), ("replicate",), "need 'ep' as the last"),
        (4, (4,), None, "the axes without names"),
        (4, (2,), ("ep",), "2 of 4 processes: build it over all of them"),
        (6, (4,), ("ep",), "0 has 6 experts, which 4 processes cannot share evenly: use .* divides 6"),
        (2, (4,), ("ep",), "0 has 2 experts for 4 processes: use at most 2 expert processes"),
        (1, (4,), ("ep",), "no experts to share out"),
    ],
)
def test_wrong_meshes_get_one_sentence(num_experts, sizes, names, sentence):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with pytest.raises(UserError, match=sentence):
        distribute(model(num_experts), mesh)


@pytest.mark.parametrize("mesh", [None, 4, "ep"])
def test_what_is_no_mesh_gets_one_sentence(mesh):
    with pytest.raises(UserError, match=r"need a DeviceMesh with the axis 'ep', as .*init_device_mesh"):
        distribute(model(4), mesh)


def copied(layers):
    return nn.parallel.DistributedDataParallel(layers)


def shared_out(layers):
    return parallelise(nn.Sequential(*layers), "fsdp+ep", 4)


def adapted(layers):
    layers[0].experts.up = Adapter(layers[0].experts.up)
    return layers


class Adapter(nn.Module):
    """Around a stacked weight, as peft has them."""

    def __init__(self, weight):
        super().__init__()
        self.base_layer = weight


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (copied, "shared out already: give ermoe.distribute the model as it was built"),
        (shared_out, "shared out already"),
        (adapted, "the experts of 0 are wrapped in adapters, .* merge_and_unload, or use ddp"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(change, sentence):
    changed = change(model(4))
    with pytest.raises(UserError, match=sentence):
        distribute(changed, init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)))


@pytest.mark.parametrize(
    ("how", "options", "num_experts", "sentence"),
    [
        ("zero", {}, 4, "parallel='zero': use one of ddp, fsdp, ep, fsdp\\+ep"),
        ("fsdp", {"expert_processes": 2}, 4, "only ep and fsdp\\+ep share out experts"),
        ("ep", {"expert_processes": 3}, 6, "4 processes cannot be cut into groups of so many"),
        ("ep", {"expert_processes": -1}, 4, "expert_processes=-1"),
        ("fsdp+ep", {}, 3, "4 processes cannot share layers of 3 experts evenly"),
    ],
)
def test_wrong_options_get_one_sentence(how, options, num_experts, sentence):
    with pytest.raises(UserError, match=sentence):
        parallelise(model(num_experts), how, 4, **options)


@pytest.mark.parametrize(("num_experts", "own"), [(4, 1), (6, 3)])
def test_experts_are_shared_by_as_many_processes_as_can(num_experts, own):
    layers = model(num_experts)
    parallelise(layers, "ep", 4)
    assert layers[0].experts.up.U.shape[0] == num_experts
    assert layers[0].experts.up.U.to_local().shape[0] == own
    assert layers[0].router.score.psi.shape[0] == num_experts
    assert isinstance(layers[0].router.score.psi, torch.nn.Parameter)


@pytest.mark.parametrize("how", ["fsdp", "ep", "fsdp+ep"])
def test_a_whole_copy_has_nothing_of_other_processes(how):
    layers = nn.Sequential(*model(4))
    kinds = [type(module) for module in layers.modules()]
    parallelise(layers, how, 4)
    shared = [(type(module), len(module._forward_pre_hooks)) for module in layers.modules()]
    copied = whole_copy(layers)
    assert [type(module) for module in copied.modules()] == kinds
    assert not any(module._forward_pre_hooks for module in copied.modules())
    assert [tuple(weight.shape) for weight in copied.parameters()] == [tuple(w.shape) for w in model(4).parameters()]
    assert not any(map(is_sharded, copied.parameters()))
    assert [(type(module), len(module._forward_pre_hooks)) for module in layers.modules()] == shared
