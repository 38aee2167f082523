"""The rivals against numbers made by running their reference implementations (V-MoE's JAX code, fairseq, scipy).

Every file of the right name in the folder is tried, and every setting is read from its arrays, so other variants need
no new test. The formulas and the meaning of the names are in the folder's own README.
"""

import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ermoe.nn.capacity import places, queue_positions
from ermoe.nn.registry import build_layer
from ermoe.nn.rivals.assignment import balanced_assignment
from ermoe.nn.rivals.losses import gshard_loss, importance_loss, load_loss
from ermoe.nn.rivals.vmoe import VMoE, VMoERouter
from support.base_layer import BaseLayer

FOLDERS = [Path(__file__).with_name("golden")]
if "ERMOE_DATA" in os.environ:
    FOLDERS.append(Path(os.environ["ERMOE_DATA"], "golden"))
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "gelu_tanh": partial(nn.GELU, approximate="tanh")}
close = partial(assert_close, rtol=0, atol=1e-5)


def files(kind):
    found = {path.name: path for folder in reversed(FOLDERS) for path in folder.glob(f"{kind}_*.npz")}
    return [found[name] for name in sorted(found)]


def load(path):
    with np.load(path) as arrays:
        return {name: _value(arrays[name]) for name in arrays.files}


def _value(array):
    return str(array) if array.dtype.kind == "U" else torch.from_numpy(array)


def cases(kind, pattern):
    """One case for each (file, tag) whose array name matches."""
    return list(_cases(kind, pattern))


def _cases(kind, pattern):
    for path in files(kind):
        with np.load(path) as arrays:
            for match in filter(None, (re.fullmatch(pattern, name) for name in arrays.files)):
                yield pytest.param(path, match, id=f"{path.stem}-{match[0]}")


def layer_from(data, router, **options):
    """A layer in evaluation mode that holds the file's experts, and its gate where there is one."""
    num_experts, dim, hidden_dim = data["W1"].shape
    gelu_tanh = ACTIVATIONS["gelu_tanh"]
    layer = build_layer(router, dim, hidden_dim, num_experts=num_experts, act_layer=gelu_tanh, **options).eval()
    with torch.no_grad():
        for linear, weight, bias in ((layer.experts.up, "W1", "b1"), (layer.experts.down, "W2", "b2")):
            linear.W.copy_(data[weight])
            linear.bias.copy_(data[bias])
        if "W" in data:
            layer.router.gate.W.copy_(data["W"])
    return layer


@pytest.mark.parametrize(("path", "tag"), cases("vmoe_token_choice", r"y_(k(\d+)_cf(\d+)_bpr(\d)_m(\d+))"))
def test_v_moe_layer(path, tag):
    data = load(path)
    setting, top_k, capacity_factor, bpr, multiple = tag[1], int(tag[2]), int(tag[3]) / 100, int(tag[4]), int(tag[5])
    layer = layer_from(
        data,
        "v-moe",
        top_k=top_k,
        capacity_factor=capacity_factor,
        capacity_multiple=multiple,
        batch_priority="eval" if bpr else "never",
        group_size=1,
    )
    x = data["x"]
    (G, S, _), E = x.shape, data["W"].shape[1]
    routing = layer.route(x)
    close(layer.router.gate(x), data["logits"])
    close(routing.score_TE.view(G, S, E), data["gates"])
    assert torch.equal(routing.expert_TK.view(G, S, top_k).int(), data[f"chosen_experts_k{top_k}"].int())
    assert places(S, top_k, E, capacity_factor, multiple) == int(data[f"capacity_{setting}"])
    close(routing.dense_weights().view(G, S, E), data[f"combine_{setting}"])
    assert_same_slots(layer.router, routing, data, setting, bpr)
    close(layer(x), data[f"y_{setting}"])


def assert_same_slots(router, routing, data, setting, bpr):
    G, S, E = data["gates"].shape
    expert_GSK = routing.expert_TK.view(G, S, -1)
    kept_GSK = routing.kept_TK.view(G, S, -1)
    priority_GS = routing.score_TE.amax(-1).view(G, S) if bpr else None
    position_GSK = queue_positions(expert_GSK, E, priority_GS=priority_GS).masked_fill(~kept_GSK, -1)
    slot_GSE = torch.full((G, S, E), -1).scatter(-1, expert_GSK, position_GSK)
    assert torch.equal(slot_GSE.int(), data[f"slot_{setting}"].int())
    assert torch.equal(slot_GSE >= 0, data[f"dispatch_{setting}"].bool())
    assert int(routing.num_dropped) == expert_GSK.numel() - int(data[f"dispatch_{setting}"].sum())


@pytest.mark.parametrize(("path", "tag"), cases("vmoe_token_choice", r"tie_combine_k(\d+)_cf(\d+)_bpr(\d)_m(\d+)"))
def test_v_moe_ties(path, tag):
    data = load(path)
    gate_GSE = data["tie_gates"]
    settings = VMoE(
        top_k=int(tag[1]),
        capacity_factor=int(tag[2]) / 100,
        capacity_multiple=int(tag[4]),
        batch_priority="eval" if int(tag[3]) else "never",
    )
    router = VMoERouter(8, gate_GSE.shape[-1], settings).eval()
    combine_GSE = router.choose(gate_GSE).dense_weights().view(gate_GSE.shape)
    assert torch.equal(combine_GSE > 0, data[tag[0]] > 0)
    close(combine_GSE, data[tag[0]])


@pytest.mark.parametrize("path", files("vmoe_token_choice"))
def test_v_moe_losses_without_noise(path):
    data = load(path)
    gate_GSE = data["gates"]
    close(importance_loss(gate_GSE), data["importance_loss"])
    close(gshard_loss(gate_GSE), data["gshard_loss"])
    router = VMoERouter(8, gate_GSE.shape[-1], VMoE(noise_std=0, importance_weight=1))
    close(router.loss(data["logits"], data["logits"]), data["auxiliary_loss"].mean())


@pytest.mark.parametrize("path", files("vmoe_aux_losses"))
def test_v_moe_losses_and_their_gradients(path):
    data = load(path)
    sigma, top_k = float(data["noise_std_effective"]), int(data["num_selected_experts"])
    clean, noisy = (data[name].requires_grad_() for name in ("clean_logits", "noisy_logits"))

    def gradients(loss_G, *wrt):
        return torch.autograd.grad(loss_G.sum(), wrt)

    importance_G = importance_loss(clean.softmax(-1))
    close(importance_G, data["importance_loss"])
    close(gradients(importance_G, clean)[0], data["grad_importance_wrt_clean"])
    close(gshard_loss(clean.softmax(-1)), data["gshard_loss_clean"])
    gshard_G = gshard_loss(noisy.softmax(-1))
    close(gshard_G, data["gshard_loss_noisy"])
    close(gradients(gshard_G, noisy)[0], data["grad_gshard_wrt_noisy"])
    for k in (int(name.removeprefix("load_loss_k")) for name in data if name.startswith("load_loss_k")):
        close(load_loss(clean, noisy, sigma, k), data[f"load_loss_k{k}"])
    through_clean, through_noisy = gradients(load_loss(clean, noisy, sigma, top_k), clean, noisy)
    close(through_clean, data["grad_load_wrt_clean_only"])
    close(through_noisy, data["grad_load_wrt_noisy_only"])
    close(through_clean + through_noisy, data["grad_load_total"])


@pytest.mark.parametrize("path", files("vmoe_aux_losses"))
def test_v_moe_router_in_training(path, monkeypatch):
    data = load(path)
    clean = data["clean_logits"]
    (G, S, E), weights = clean.shape, data["router_weights_gshard_importance_load"].tolist()
    settings = VMoE(
        top_k=int(data["num_selected_experts"]),
        noise_std=float(data["noise_std"]),
        capacity_factor=1.0,
        batch_priority="never",
        group_size=1,
        gshard_weight=weights[0],
        importance_weight=weights[1],
        load_weight=weights[2],
    )
    router = VMoERouter(E, E, settings)
    nn.init.eye_(router.gate.W)
    monkeypatch.setattr(torch, "randn_like", lambda values: data["eps"].view(values.shape))
    routing = router(clean)
    close(routing.dense_weights().view(G, S, E), data["router_combine"])
    close(routing.auxiliary_loss, data["router_auxiliary_loss"].mean())
    for group in range(G):
        own = slice(group, group + 1)
        close(router.loss(clean[own], data["noisy_logits"][own]), data["router_auxiliary_loss"][group])


@pytest.mark.parametrize(("path", "tag"), cases("vmoe_expert_choice", r"y_(cf(\d+)_m(\d+))"))
def test_expert_choice_layer(path, tag):
    data = load(path)
    setting, capacity_factor, multiple = tag[1], int(tag[2]) / 100, int(tag[3])
    layer = layer_from(data, "expert-choice", capacity_factor=capacity_factor, capacity_multiple=multiple)
    x = data["x"]
    (G, S, _), E = x.shape, data["W"].shape[1]
    routing = layer.route(x)
    close(layer.router.gate(x), data["logits"])
    close(routing.score_TE.view(G, S, E), data["gates"])
    assert places(S, 1, E, capacity_factor, multiple) == int(data[f"capacity_{setting}"])
    first_token = S * torch.arange(G)[:, None, None]
    assert torch.equal((routing.token_A.view(G, E, -1) - first_token).int(), data[f"selected_tokens_{setting}"].int())
    per_token = torch.bincount(routing.token_A, minlength=G * S).view(G, S)
    assert torch.equal(per_token.int(), data[f"experts_per_token_{setting}"].int())
    close(routing.dense_weights().view(G, S, E), data[f"combine_{setting}"])
    close(layer(x), data[f"y_{setting}"])


@pytest.mark.parametrize(("path", "tag"), cases("vmoe_soft_moe", r"y_f32_(s\d+)"))
def test_soft_moe_layer(path, tag):
    data = load(path)
    x, phi = data["x"], data["mu"]
    _, E, P = phi.shape
    (G, S, D), capacity_factor = x.shape, E * P / x.shape[1]
    layer = layer_from(data, "soft", num_tokens=S, capacity_factor=capacity_factor)
    assert layer.slots_per_expert == P
    with torch.no_grad():
        layer.phi.copy_(phi)
        layer.scale.copy_(data[f"scale_{tag[1]}"])
    dispatch_GSQ, combine_GSQ = layer.weights(x)
    close(dispatch_GSQ.view(G, S, E, P), data[f"dispatch_{tag[1]}"])
    close(combine_GSQ.view(G, S, E, P), data[f"combine_{tag[1]}"])
    close((dispatch_GSQ.mT @ x).view(G, E, P, D), data[f"slot_inputs_f32_{tag[1]}"])
    close(layer(x), data[tag[0]])
    share_GSE = data[f"combine_{tag[1]}"].sum(-1)
    assert torch.equal(layer.route(x).expert_TK.view(G, S), share_GSE.argmax(-1))


@pytest.mark.parametrize("path", files("base_layer"))
def test_balanced_assignment_is_the_best_one(path):
    data = load(path)
    scores = data["scores"]
    assigned = balanced_assignment(scores)
    assert torch.equal(assigned.int(), data["lsa_assignment"].int())
    assert (assigned.bincount(minlength=scores.shape[1]) == int(data["capacity"])).all()
    close(scores.double().gather(1, assigned[:, None]).sum(), data["lsa_total_f64"])


def base_layer_from(data, num_sublayers):
    num_experts, _, hidden_dim, dim = data["ff1_weight"].shape
    activation = ACTIVATIONS[data.get("activation", "relu")]
    layer = BaseLayer(dim, hidden_dim, num_experts=num_experts, num_sublayers=num_sublayers, act_layer=activation)
    with torch.no_grad():
        layer.router.centroid_ED.copy_(data["centroids"])
        layer.experts.ln_weight_LED.copy_(data["ln_weight"][:, :num_sublayers].transpose(0, 1))
        layer.experts.ln_bias_LED.copy_(data["ln_bias"][:, :num_sublayers].transpose(0, 1))
        for number, experts in enumerate(layer.experts.stack):
            for linear, name in ((experts.up, "ff1"), (experts.down, "ff2")):
                linear.W.copy_(data[f"{name}_weight"][:, number].mT)
                linear.bias.copy_(data[f"{name}_bias"][:, number])
    return layer


@pytest.mark.parametrize(("path", "tag"), cases("base_layer", r"y_greedy_L(\d+)"))
def test_base_layer_at_test_time(path, tag):
    data = load(path)
    layer = base_layer_from(data, int(tag[1])).eval()
    routing = layer.route(data["h"])
    close(routing.score_TE, data["affinity"])
    assert torch.equal(routing.expert_TK[:, 0].int(), data["greedy_expert"].int())
    close(layer(data["h"]), data[tag[0]])


@pytest.mark.parametrize(("path", "tag"), cases("base_layer", r"y_balanced_per_worker_L(\d+)"))
def test_base_layer_in_training(path, tag):
    """The reference balances each worker's own tokens, by an auction that is not exact: ours is never worse."""
    data = load(path)
    layer = base_layer_from(data, int(tag[1]))
    h, theirs = data["h"], data["balanced_per_worker_expert"].long()
    num_experts = len(data["centroids"])
    routing = layer.router.choose(data["affinity"], theirs)
    close(layer.mix(h, routing), data[tag[0]])
    for rows in torch.arange(len(h)).chunk(num_experts):
        routing = layer.route(h[rows])
        assert (routing.count_E == len(rows) // num_experts).all()
        score, their_expert = routing.score_TE.double(), theirs[rows, None]
        assert score.gather(1, routing.expert_TK).sum() >= score.gather(1, their_expert).sum() - 1e-5
        agree = routing.expert_TK[:, 0] == theirs[rows]
        close(layer(h[rows])[agree], data[tag[0]][rows][agree])
