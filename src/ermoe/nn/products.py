"""How rows sorted by expert meet the experts' stacked weights: the one replaceable piece of the layer.

An expert is written once, in terms of ``linear`` and ``scale`` of a `Products`; the classes here decide what those
mean. `expert_at_a_time` suits the CPU, where one expert's activations stay in cache. Where those of all experts do,
there are faster ways: `product_at_a_time` without gradients, and with them `padded`, for about equally many rows.
`grouped` has static shapes and needs no host sync, so it suits CUDA and ``torch.compile``. `batched` products are
static too, and nothing but ordinary ones: with every token for every expert, they serve exporters and are the slow twin
of the others. Of weights that are shared out among processes they take what is here.

Letters: A rows (pairs sorted by expert), E experts, I input and O output width of one weight, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ermoe.nn.sharding import at_work
from ermoe.nn.tracing import is_transformed

_MOST_PADDING = 1.25  # rows with padding over rows without
_CACHED = 2**20  # numbers of all experts' hidden activations
_NEARLY_CACHED = 2**22  # the same, where no gradient needs them again
_ROWS_TO_TAKE_TURNS = 128  # of an expert, on average
_SMALL_STACK = 2**20  # numbers: what all experts' weights may have to be merged at once
_COMPUTABLE = (torch.float32, torch.bfloat16, torch.float16)  # by grouped_mm
_TRACEABLE = _COMPUTABLE if torch.__version__ >= "2.15" else (torch.bfloat16,)  # what its graphs may hold


class Products(ABC):
    """The operations of which every expert is made."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
        """x W + b with the rows' own expert; ``weight`` is (E, I, O), or (E, O, I) if ``transposed``."""

    @abstractmethod
    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        """x · s, column by column, with the rows' own expert; ``factor`` is (E, I)."""

    def merged(self, x: Tensor, U: Tensor, s: Tensor, V: Tensor, bias: Tensor | None) -> Tensor:
        """x W + b with W = U diag(s) Vᵀ built first."""
        return self.linear(x, _merge(at_work(U), at_work(s), at_work(V)), bias)

    def scaled(self, basis: Tensor, s: Tensor) -> Tensor:
        """U diag(s) of all experts, (E, I, R)."""
        return at_work(basis) * at_work(s).unsqueeze(1)

    @abstractmethod
    def rows_per_expert(self, x: Tensor) -> float:
        """How many rows of ``x`` an expert has, on average."""


Expert = Callable[[Tensor, Products], Tensor]


def _merge(U: Tensor, s: Tensor, V: Tensor) -> Tensor:
    return (U * s.unsqueeze(-2)) @ V.mT


class _OneExpert(Products):
    """Products with the weights of a single expert.

    A stacked parameter is unbound once: its gradient is then assembled by one stack. Indexing it expert by expert
    would instead build one gradient of full size per expert. It is also taken from where it is once, merged or not:
    each time, processes with copies of it add up what they learn, and their rows may tell them to merge or not.
    """

    def __init__(self) -> None:
        self.expert = 0
        self._here: dict[int, tuple[Tensor, Tensor]] = {}
        self._unbound: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._merged: dict[int, tuple[Tensor, Tensor]] = {}
        self._scaled: dict[int, tuple[Tensor, Tensor]] = {}

    def _own(self, stacked: Tensor) -> Tensor:
        if id(stacked) not in self._unbound:
            self._unbound[id(stacked)] = (stacked, self._whole_stack(stacked).unbind(0))
        return self._unbound[id(stacked)][1][self.expert]

    def _whole_stack(self, stacked: Tensor) -> Tensor:
        if id(stacked) not in self._here:
            self._here[id(stacked)] = (stacked, at_work(stacked))  # an id is unique only while its tensor lives
        return self._here[id(stacked)][1]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
        own = self._own(weight).t() if transposed else self._own(weight)
        return x @ own if bias is None else torch.addmm(self._own(bias), x, own)

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        return x * self._own(factor).to(x.dtype)

    def merged(self, x: Tensor, U: Tensor, s: Tensor, V: Tensor, bias: Tensor | None) -> Tensor:
        weight = self._own_merged(U, s, V)
        return x @ weight if bias is None else torch.addmm(self._own(bias), x, weight)

    def _own_merged(self, U: Tensor, s: Tensor, V: Tensor) -> Tensor:
        """Small weights are merged for all experts at once: it takes hardly longer than one of them."""
        if U.shape[0] * U.shape[1] * V.shape[1] > _SMALL_STACK:
            return _merge(self._own(U), self._own(s), self._own(V))
        if id(U) not in self._merged:
            self._merged[id(U)] = (U, _merge(*map(self._whole_stack, (U, s, V))))
        return self._own(self._merged[id(U)][1])

    def scaled(self, basis: Tensor, s: Tensor) -> Tensor:
        if id(basis) not in self._scaled:
            self._scaled[id(basis)] = (basis, self._whole_stack(basis) * self._whole_stack(s).unsqueeze(1))
        return self._scaled[id(basis)][1]

    def rows_per_expert(self, x: Tensor) -> float:
        return x.shape[0]


class _RowsInTurn(Products):
    """Each product of all experts, one expert's rows after the other's, into one result; it has no gradients."""

    def __init__(self, count_E: Tensor) -> None:
        self._counts = count_E.tolist()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
        weight = at_work(weight).mT if transposed else at_work(weight)
        y = x.new_empty(x.shape[0], weight.shape[2])
        places = zip(x.split(self._counts), weight.unbind(0), y.split(self._counts), strict=True)
        if bias is None:
            for rows, own, place in places:
                torch.mm(rows, own, out=place)
        else:
            for (rows, own, place), own_bias in zip(places, at_work(bias).unbind(0), strict=True):
                torch.addmm(own_bias, rows, own, out=place)
        return y

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        y = torch.empty_like(x)
        places = (x.split(self._counts), at_work(factor).unbind(0), y.split(self._counts))
        for rows, own, place in zip(*places, strict=True):
            torch.mul(rows, own, out=place)
        return y

    def rows_per_expert(self, x: Tensor) -> float:
        return x.shape[0] / len(self._counts)


class _GroupedRows(Products):
    """Products of all experts at once with ``grouped_mm``, rows sorted by expert."""

    def __init__(self, count_E: Tensor, num_rows: int) -> None:
        self._end_E = count_E.cumsum(0).to(torch.int32)
        experts = torch.arange(len(count_E), device=count_E.device)
        self._expert_A = torch.repeat_interleave(experts, count_E, output_size=num_rows)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
        dtype = compute_dtype(x)  # grouped_mm is unknown to autocast
        weight = at_work(weight).mT if transposed else at_work(weight)
        y = F.grouped_mm(x.to(dtype), weight.to(dtype), offs=self._end_E)
        return y if bias is None else y + at_work(bias).to(dtype)[self._expert_A]

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        return x * at_work(factor).to(x.dtype)[self._expert_A]

    def rows_per_expert(self, x: Tensor) -> float:
        return x.shape[0] / len(self._end_E)


class _AllExperts(Products):
    """Products of every expert with equally many rows: x is (E, A / E, I)."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
        weight = at_work(weight).mT if transposed else at_work(weight)
        return x @ weight if bias is None else torch.baddbmm(at_work(bias).unsqueeze(1), x, weight)

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        return x * at_work(factor).unsqueeze(1).to(x.dtype)

    def rows_per_expert(self, x: Tensor) -> float:
        return x.shape[1]


def expert_at_a_time(expert: Expert, x_AD: Tensor, count_E: Tensor) -> Tensor:
    """All products of one expert on its rows, then the next expert. Reads the counts on the host."""
    products = _OneExpert()
    outputs = []
    for products.expert, rows in enumerate(torch.split(x_AD, count_E.tolist())):
        outputs.append(expert(rows, products))
    return torch.cat(outputs)


def product_at_a_time(expert: Expert, x_AD: Tensor, count_E: Tensor) -> Tensor:
    """One product of all experts, then the next; what lies between them is computed once for all rows.

    Without gradients, because products write into a result that is there already.
    """
    return expert(x_AD, _RowsInTurn(count_E))


def pays_in_turn(x_AD: Tensor, weight: Tensor, width: int) -> bool:
    """Whether `product_at_a_time` is allowed and saves time: where hidden layers of ``width`` stay in cache together.

    Measured on two cores, 8 experts, forward: 1,576 rows of 192 numbers and 768 hidden units take 0.89 of their time,
    twice the rows 0.88 (with less cache 1.0), and at ViT-B's size it takes 1.2 times as long. With few rows an expert
    `padded` is faster.
    """
    has_gradients = torch.is_grad_enabled() or is_transformed()
    is_plain = x_AD.dtype == weight.dtype and not torch.is_autocast_enabled(x_AD.device.type)
    has_rows = x_AD.shape[0] >= _ROWS_TO_TAKE_TURNS * weight.shape[0]
    return is_plain and not has_gradients and has_rows and x_AD.shape[0] * width <= _NEARLY_CACHED


def padded(expert: Expert, x_AD: Tensor, count_E: Tensor) -> Tensor:
    """All experts at once, each with as many rows as the busiest; those beyond its own are zero and lead nowhere."""
    num_experts, num_rows, most = len(count_E), x_AD.shape[0], int(count_E.max())
    before_E = torch.arange(num_experts, device=x_AD.device) * most - (count_E.cumsum(0) - count_E)
    place_A = torch.arange(num_rows, device=x_AD.device)
    place_A = place_A + torch.repeat_interleave(before_E, count_E, output_size=num_rows)
    x_EAD = x_AD.new_zeros(num_experts * most, x_AD.shape[1]).index_copy(0, place_A, x_AD)
    y_EAD = batched(expert, x_EAD.unflatten(0, (num_experts, most)))
    return y_EAD.flatten(0, 1).index_select(0, place_A)


def pays_to_pad(count_E: Tensor, width: int) -> bool:
    """Whether `padded` saves time: where hidden layers of ``width`` stay in cache together, and few rows are added.

    Measured on two cores, 8 experts: a training step with 425 rows of 48 numbers an expert takes 0.6 of its time, with
    197 rows of 192 and 480 hidden units 0.7 to 0.8; with 768 hidden units and twice the rows it is even.
    """
    most = float(count_E.max())
    return most * len(count_E) <= min(_MOST_PADDING * float(count_E.sum()), _CACHED / width)


def alone(expert: Expert, x_TD: Tensor) -> Tensor:
    """The only expert of a stack of one on all rows: nothing to sort, nothing to count."""
    return expert(x_TD, _OneExpert())


def one_of_many(expert: Expert, x_AD: Tensor, index: int) -> Tensor:
    """Expert ``index`` of a stack on its rows, however many they are."""
    products = _OneExpert()
    products.expert = index
    return expert(x_AD, products)


def grouped(expert: Expert, x_AD: Tensor, count_E: Tensor) -> Tensor:
    """Each product of all experts in one call of ``torch.nn.functional.grouped_mm``."""
    return expert(x_AD, _GroupedRows(count_E, x_AD.shape[0]))


def batched(expert: Expert, x_EAD: Tensor) -> Tensor:
    """Equally many rows for each expert, (E, A / E, D), as one batched product of static shape."""
    return expert(x_EAD, _AllExperts())


def fits_grouped(x: Tensor, *widths: int) -> bool:
    """Whether ``grouped_mm`` takes these rows: no float64, and strides that are multiples of 16 bytes."""
    dtype = compute_dtype(x)
    if dtype not in (_TRACEABLE if torch.compiler.is_compiling() else _COMPUTABLE):
        return False
    return all(width * dtype.itemsize % 16 == 0 for width in widths)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision in which rows meet weights: that of autocast where it is on."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
