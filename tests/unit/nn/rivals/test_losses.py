import copy
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import ermoe
from ermoe.nn.registry import LAYERS
from ermoe.nn.rivals.losses import gshard_loss, importance_loss, load_loss, mean_over_groups
from support import slow_routers as slow
from support.routers import DIM, build, inputs

LOSSY = ["v-moe", "cosine"]


@pytest.mark.parametrize(("groups", "tokens", "experts"), [(1, 5, 2), (3, 11, 6)])
def test_losses_against_loops(groups, tokens, experts):
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, groups, tokens, experts, generator=generator, dtype=torch.float64)
    noisy = clean + 0.3 * noise
    gates = clean.softmax(-1)
    assert_close(importance_loss(gates).tolist(), [slow.importance(gate) for gate in gates])
    assert_close(gshard_loss(gates).tolist(), [slow.gshard(gate) for gate in gates])
    for top_k in range(1, experts + 1):
        expected = [slow.load(c, n, 0.3, top_k) for c, n in zip(clean, noisy, strict=True)]
        assert_close(load_loss(clean, noisy, 0.3, top_k).tolist(), expected)


def test_losses_see_only_real_tokens():
    logits = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9).expand(2, -1) < torch.tensor([[6], [9]])
    gates = logits.softmax(-1)
    for loss in (importance_loss, gshard_loss, lambda v, m=None: load_loss(v, v, 0.25, 2, m)):
        assert_close(loss(gates, mask)[0], loss(gates[:1, :6])[0])
        assert_close(loss(gates, mask)[1], loss(gates)[1])


def test_the_mean_over_groups_leaves_empty_groups_out():
    mask = torch.tensor([[True, False], [False, False]])
    assert mean_over_groups(torch.tensor([3.0, 0.0]), mask) == 3
    assert mean_over_groups(torch.tensor([3.0, 1.0])) == 2
    assert mean_over_groups(torch.zeros(0)) == 0


def test_equal_loads_have_a_finite_gradient():
    gates = torch.full((1, 4, 4), 0.25, requires_grad=True)
    importance_loss(gates).sum().backward()
    assert torch.equal(gates.grad, torch.zeros(1, 4, 4))


def model(name):
    return nn.Sequential(build(name), build(name, seed=1))


@pytest.mark.parametrize("name", LOSSY)
def test_losses_are_summed_over_layers_and_pulled_once(name):
    network = model(name)
    x, _ = inputs()
    torch.manual_seed(0)
    network(x)
    total = ermoe.auxiliary_loss(network)
    torch.manual_seed(0)
    network(x)
    parts = [ermoe.auxiliary_loss(layer) for layer in network]
    assert_close(total, parts[0] + parts[1])
    assert total > 0
    assert ermoe.auxiliary_loss(network) == 0


@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_and_route_leave_no_loss(name):
    layer = build(name)
    x, context = inputs()
    layer.route(x, context)
    assert ermoe.auxiliary_loss(layer) == 0
    layer.eval()(x, context)
    assert ermoe.auxiliary_loss(layer) == 0


def losses_of(layer, *batches):
    """Each batch's own loss, with the same noise as when they follow each other."""
    values = []
    for batch in batches:
        layer(batch)
        values.append(ermoe.auxiliary_loss(layer))
    return values


@pytest.mark.parametrize("name", LOSSY)
def test_several_forwards_of_one_step_are_averaged(name):
    layer = build(name, {"noise_std": 0.0} if name == "v-moe" else {})
    views = [inputs(seed=seed)[0] for seed in range(3)]
    expected = torch.stack(losses_of(layer, *views)).mean()
    outputs = [layer(view) for view in views]
    loss = ermoe.auxiliary_loss(layer)
    assert_close(loss, expected)
    (sum(output.sum() for output in outputs) + loss).backward()


@pytest.mark.parametrize("name", LOSSY)
def test_a_forward_whose_step_is_over_no_longer_counts(name):
    layer = build(name, {"noise_std": 0.0} if name == "v-moe" else {})
    old, new = inputs(seed=1)[0], inputs(seed=2)[0]
    expected = losses_of(layer, new)[0]
    kept_alive = layer(old)
    kept_alive.sum().backward()  # a step whose auxiliary loss nobody pulled
    layer(new).sum()
    loss = ermoe.auxiliary_loss(layer)
    assert_close(loss, expected)
    loss.backward()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("ended", ["pulled", "backward", "neither"])
def test_few_forwards_outlive_their_step(name, ended):
    layer = build(name)
    x, _ = inputs()
    losses = []
    for _ in range(20):
        y = layer(x).square().mean()
        losses.append(weakref.ref(layer.router._losses[-1]))
        if ended == "pulled":
            ermoe.auxiliary_loss(layer)
        if ended == "backward":
            y.backward()
    del y
    gc.collect()
    assert sum(loss() is not None for loss in losses) == (8 if ended == "neither" else 0)


def test_a_copy_of_a_model_in_training_has_no_losses():
    layer = build("v-moe")
    layer(inputs()[0])
    assert ermoe.auxiliary_loss(copy.deepcopy(layer)) == 0
    assert ermoe.auxiliary_loss(layer) > 0


class Saved:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # an operation may save its own output, which would keep itself alive


@pytest.fixture
def only_new_objects():
    """The collector looks at what is made from here on, and at nothing that other tests have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def what_lives():
    """Objects, tensors saved in graphs, and bytes of tensors: each kind of leak makes one of them grow."""
    gc.collect()
    objects = gc.get_objects()
    saved = sum(type(thing) is Saved for thing in objects)
    tensors = [thing for thing in objects if issubclass(type(thing), torch.Tensor)]
    return len(objects), saved, sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(("names", "pulled"), [(list(LAYERS), True), (LOSSY, False)], ids=["pulled", "never pulled"])
def test_steps_do_not_grow_memory(names, pulled, only_new_objects):
    layers = nn.ModuleList(build(name) for name in names)
    x, context = inputs(batch=1, tokens=64)
    lives = []
    for step in range(41):
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            loss = sum(layer(x, context).mean() for layer in layers)
            if pulled:
                loss = loss + ermoe.auxiliary_loss(layers)
        loss.backward()
        ermoe.update_balance(layers)
        if step and step % 10 == 0:
            lives.append(what_lives())
    # A leak grows from each look to the next; what else the process does may add objects once or twice.
    objects, saved, num_bytes = (
        [after - before for before, after in pairwise(row)] for row in zip(*lives, strict=True)
    )
    assert min(objects) < 10, "one object a step is 10"
    assert min(saved) <= 0
    assert min(num_bytes) <= 0


@pytest.mark.parametrize("name", LOSSY)
def test_checkpointing_repeats_noise_and_routes_and_counts_losses_once(name):
    network = nn.Sequential(build(name), build(name, seed=1))
    x = inputs()[0].requires_grad_()

    def step(run):
        torch.manual_seed(3)
        network.zero_grad()
        x.grad = None
        y = x
        for layer in network:
            y = run(layer, y)
        loss = ermoe.auxiliary_loss(network)
        (y.square().mean() + loss).backward()
        assert ermoe.auxiliary_loss(network) == 0  # the repeated forward left nothing
        return [y, loss, x.grad, *(parameter.grad for parameter in network.parameters())]

    plain = step(lambda layer, y: layer(y))
    repeated = step(lambda layer, y: checkpoint(layer, y, use_reentrant=False))
    for one, other in zip(plain, repeated, strict=True):
        assert torch.equal(one, other)


def test_a_model_without_losses_gives_zero():
    assert ermoe.auxiliary_loss(nn.Linear(DIM, DIM)) == 0
