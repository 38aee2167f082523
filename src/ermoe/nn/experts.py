"""The experts: MLPs whose weights are stacked over experts, kept as U diag(s) Vᵀ or as plain matrices.

Row convention: y = x W + b. Experts know nothing of routing; they are given rows sorted by expert.

Letters: E experts, A rows, T tokens, D model width, H hidden width, I input and O output width of one weight, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ermoe.nn import products
from ermoe.nn.basis import random_basis
from ermoe.nn.exchange import exchanged
from ermoe.nn.products import Products
from ermoe.nn.sharding import is_sharded
from ermoe.nn.start import Start, parameter
from ermoe.nn.tracing import is_for_onnx, is_transformed


class EigenLinear(nn.Module):
    """E linear maps, W = U diag(s) Vᵀ each, with orthonormal columns in U (E, I, R) and V (E, O, R)."""

    def __init__(
        self,
        num_experts: int,
        in_dim: int,
        out_dim: int,
        rank: int,
        *,
        bias: bool = True,
        **start: Unpack[Start],
    ) -> None:
        super().__init__()
        if not 1 <= rank <= min(in_dim, out_dim):
            raise ValueError(
                f"rank={rank}: a {in_dim}×{out_dim} weight has at most {min(in_dim, out_dim)} orthonormal directions; "
                f"use 1 <= rank <= {min(in_dim, out_dim)}"
            )
        self.U = parameter(num_experts, in_dim, rank, **start)
        self.s = parameter(num_experts, rank, **start)
        self.V = parameter(num_experts, out_dim, rank, **start)
        self.bias = parameter(num_experts, out_dim, **start) if bias else None
        self.reset_parameters(start.get("generator"))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Random orthonormal bases and equal s, with the Frobenius norm of a Xavier-initialised weight."""
        if self.U.is_meta:
            return
        (num_experts, in_dim, rank), out_dim = self.U.shape, self.V.shape[1]
        with torch.no_grad():
            self.U.copy_(random_basis(num_experts, in_dim, rank, generator=generator))
            self.V.copy_(random_basis(num_experts, out_dim, rank, generator=generator))
            # R s² = ‖W‖² = I·O · 2 / (I + O)
            self.s.fill_(math.sqrt(2 * in_dim * out_dim / ((in_dim + out_dim) * rank)))
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x: Tensor | None, ops: Products | None) -> Tensor:
        """((x U) · s) Vᵀ + b, or x W + b where so many rows share an expert that building W first is cheaper.

        Between the two, s goes into the shorter basis, where it takes fewer multiplications than with every row. A
        graph in a file takes any number of rows, so none decides there. Without rows it is U: what wraps this module
        to change a parameter, as adapters do, changes it in here alone.
        """
        if x is None or ops is None:
            return self.U
        U, s, V = self.U, self.s, self.V  # once: adapters compute them anew whenever they are asked
        (_, in_dim, rank), out_dim = U.shape, V.shape[1]
        rows = 0.0 if torch.compiler.is_exporting() else ops.rows_per_expert(x)
        if rows * (rank * (in_dim + out_dim) - in_dim * out_dim) > in_dim * rank * out_dim:
            return ops.merged(x, U, s, V, self.bias)
        if rows > min(in_dim, out_dim):
            left, right = (ops.scaled(U, s), V) if in_dim <= out_dim else (U, ops.scaled(V, s))
            return ops.linear(ops.linear(x, left), right, self.bias, transposed=True)
        return ops.linear(ops.scale(ops.linear(x, U), s), V, self.bias, transposed=True)

    @property
    def in_dim(self) -> int:
        """Width I of what comes in."""
        return self.U.shape[1]

    def matrices(self) -> Tensor:
        """The materialised weights, (E, I, O)."""
        return (self.U * self.s.unsqueeze(1)) @ self.V.mT


class DenseLinear(nn.Module):
    """E linear maps with plain weights (E, I, O)."""

    def __init__(
        self,
        num_experts: int,
        in_dim: int,
        out_dim: int,
        *,
        bias: bool = True,
        **start: Unpack[Start],
    ) -> None:
        super().__init__()
        self.W = parameter(num_experts, in_dim, out_dim, **start)
        self.bias = parameter(num_experts, out_dim, **start) if bias else None
        self.reset_parameters(start.get("generator"))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Xavier-uniform weights, zero biases."""
        if self.W.is_meta:
            return
        in_dim, out_dim = self.W.shape[1:]
        bound = math.sqrt(6 / (in_dim + out_dim))
        with torch.no_grad():
            self.W.uniform_(-bound, bound, generator=generator)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x: Tensor, ops: Products) -> Tensor:
        """x W + b."""
        return ops.linear(x, self.W, self.bias)

    @property
    def in_dim(self) -> int:
        """Width I of what comes in."""
        return self.W.shape[1]

    def matrices(self) -> Tensor:
        """The weights, (E, I, O)."""
        return self.W


class Experts(nn.Module):
    """E feed-forward networks of one shape: down(act(up(x))), or down(act(gate(x)) · up(x)) when gated.

    ``norm_layer`` makes the normalisation of what enters ``down``, given its width. It has no parameters: a scale and a
    shift there are part of ``down`` and its bias.

    >>> experts = build_experts(8, 16, num_experts=2, experts="eigen", rank=4)
    >>> experts(torch.randn(5, 8), torch.tensor([3, 2])).shape  # three rows for expert 0, two for expert 1
    torch.Size([5, 8])
    """

    same_start = False  # whether `reset_parameters` gives all experts one and the same draw

    def __init__(
        self,
        up: EigenLinear | DenseLinear,
        down: EigenLinear | DenseLinear,
        *,
        gate: EigenLinear | DenseLinear | None = None,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        norm_layer: Callable[[int], nn.Module] | None = None,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.up = up
        self.down = down
        self.act = act_layer()
        self.inner_norm = None if norm_layer is None else norm_layer(self.size[0])
        self.drop = nn.Dropout(drop)
        if self.inner_norm is not None and any(True for _ in self.inner_norm.parameters()):
            raise ValueError(
                f"norm_layer makes a {type(self.inner_norm).__name__} with parameters: give it none, for example by "
                "elementwise_affine=False"
            )

    @property
    def num_experts(self) -> int:
        """Number of experts, E."""
        return next(self.parameters()).shape[0]

    @property
    def dim(self) -> int:
        """Width of the tokens, D."""
        return bare(self.up).in_dim

    @property
    def size(self) -> tuple[int, int | None]:
        """Hidden width and rank of an expert; no rank for plain weights."""
        up = bare(self.up)
        return (up.V.shape[1], up.s.shape[1]) if isinstance(up, EigenLinear) else (up.W.shape[2], None)

    @property
    def entry(self) -> EigenLinear | DenseLinear:
        """The weight through which tokens enter, and by which they may be routed."""
        return self.up if self.gate is None else self.gate

    @property
    def is_adapted(self) -> bool:
        """Whether weights are wrapped in adapters that change them in every pass, as those of peft do."""
        return any(linear is not bare(linear) for linear in (self.gate, self.up, self.down) if linear is not None)

    @property
    def token_basis(self) -> Tensor | None:
        """The basis (E, D, R) through which tokens enter the experts, or None for plain weights."""
        entry = self.entry
        if not isinstance(bare(entry), EigenLinear):
            return None
        return entry.U if isinstance(entry, EigenLinear) else entry(None, None)  # as an adapter shows it

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws all weights anew."""
        for linear in self.linears():
            linear.reset_parameters(generator)
        if self.same_start:
            with torch.no_grad():
                for stacked in self.parameters():
                    stacked.copy_(stacked[:1].clone().expand_as(stacked))

    def linears(self) -> list[EigenLinear | DenseLinear]:
        """The stacked weights in the order in which a token meets them; refused where an adapter changes them."""
        if self.is_adapted:
            raise ValueError("experts are wrapped in adapters: merge them first, in peft with merge_and_unload")
        return [linear for linear in (self.gate, self.up, self.down) if linear is not None]

    def expert(self, x: Tensor, ops: Products) -> Tensor:
        """One expert's function, whatever ``ops`` makes of it (see `ermoe.nn.products`)."""
        hidden = self.up(x, ops)
        hidden = self.act(hidden) if self.gate is None else self.act(self.gate(x, ops)) * hidden
        if self.drop.p:
            hidden = self.drop(hidden)
        if self.inner_norm is not None:
            hidden = self.inner_norm(hidden)
        output: Tensor = self.down(hidden, ops)
        return self.drop(output) if self.drop.p else output

    def forward(self, x_AD: Tensor, count_E: Tensor) -> Tensor:
        """Expert outputs of rows sorted by expert, ``count_E`` rows each, (A, D); wherever the experts are."""
        weight = next(self.parameters())
        if is_sharded(weight):
            return exchanged(self.run, x_AD, count_E, weight.device_mesh)
        return self.run(x_AD, count_E)

    def run(self, x_AD: Tensor, count_E: Tensor) -> Tensor:
        """The same for the experts of this process alone."""
        if self.prefers_grouped(x_AD):
            return products.grouped(self.expert, x_AD, count_E)
        if x_AD.device.type == "cpu":
            width = self.size[0]
            if not self.training and products.pays_in_turn(x_AD, next(self.parameters()), width):
                return products.product_at_a_time(self.expert, x_AD, count_E)
            if products.pays_to_pad(count_E, width):
                return products.padded(self.expert, x_AD, count_E)
        return products.expert_at_a_time(self.expert, x_AD, count_E)

    def alone(self, x_TD: Tensor) -> Tensor:
        """Outputs of the only expert of a stack of one, (T, D)."""
        return products.alone(self.expert, x_TD)

    def one_of_many(self, x_AD: Tensor, index: int) -> Tensor:
        """Outputs of expert ``index`` for its own rows, (A, D)."""
        return products.one_of_many(self.expert, x_AD, index)

    def every_expert(self, x_TD: Tensor) -> Tensor:
        """All experts' outputs for all tokens, (E, T, D)."""
        return self.batched(x_TD.expand(self.num_experts, *x_TD.shape))

    def batched(self, x_EAD: Tensor) -> Tensor:
        """Outputs of equally many rows for each expert, (E, A / E, D); static shapes, no counts."""
        if is_sharded(next(self.parameters())):
            num_experts, num_rows, _ = x_EAD.shape
            count_E = torch.full((num_experts,), num_rows, device=x_EAD.device)
            y_AD: Tensor = self(x_EAD.flatten(0, 1), count_E)
            return y_AD.view(x_EAD.shape)
        return products.batched(self.expert, x_EAD)

    def prefers_grouped(self, x: Tensor) -> bool:
        """Grouped products on accelerators, in traced graphs and with adapters, wherever the kernel takes the shapes.

        Adapters compute the weights of all experts whenever they are asked, and grouped products ask once a pass. ONNX
        and vmap know no such product.
        """
        if is_for_onnx() or is_transformed():
            return False
        is_wanted = x.is_cuda or torch.compiler.is_compiling() or self.is_adapted
        return is_wanted and products.fits_grouped(x, *self._widths())

    def _widths(self) -> list[int]:
        linears = [bare(linear) for linear in (self.gate, self.up, self.down) if linear is not None]
        return [size for linear in linears for p in linear.parameters() if p.dim() == 3 for size in p.shape[1:]]


def bare(linear: nn.Module) -> EigenLinear | DenseLinear:
    """The stacked weights themselves, without the adapters of peft around them."""
    inner: Any = linear
    while not isinstance(inner, EigenLinear | DenseLinear):
        inner = inner.base_layer
    return inner


def build_experts(
    dim: int,
    hidden_dim: int | None = None,
    *,
    num_experts: int = 8,
    experts: str = "dense",
    rank: int | None = None,
    same_start: bool = False,
    gated: bool = False,
    act_layer: Callable[[], nn.Module] = nn.GELU,
    norm_layer: Callable[[int], nn.Module] | None = None,
    bias: bool = True,
    drop: float = 0.0,
    **start: Unpack[Start],
) -> Experts:
    """E feed-forward networks with a hidden layer of ``hidden_dim``, 4·dim by default.

    Args:
        experts: "dense" (plain weights) or "eigen" (U diag(s) Vᵀ).
        rank: of eigen experts; min(dim, hidden_dim) by default.
        same_start: all experts start from one and the same draw, as V-MoE's do.
        gated: SwiGLU-like experts, act(x Wg) · (x Wu).
        act_layer, norm_layer, bias, drop: of the experts' MLPs; see `Experts`.
        start: generator, device and dtype of the parameters.
    """
    hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts}: need at least one expert")
    if experts not in ("eigen", "dense"):
        raise ValueError(f"experts={experts!r}: use 'eigen' or 'dense'")

    def linear(in_dim: int, out_dim: int) -> EigenLinear | DenseLinear:
        if experts == "dense":
            return DenseLinear(num_experts, in_dim, out_dim, bias=bias, **start)
        full_rank = min(in_dim, out_dim)
        return EigenLinear(num_experts, in_dim, out_dim, full_rank if rank is None else rank, bias=bias, **start)

    gate = linear(dim, hidden_dim) if gated else None
    up, down = linear(dim, hidden_dim), linear(hidden_dim, dim)
    built = Experts(up, down, gate=gate, act_layer=act_layer, norm_layer=norm_layer, drop=drop)
    if same_start:
        built.same_start = True
        built.reset_parameters(start.get("generator"))
    return built
