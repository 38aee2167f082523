"""Worker processes that prepare batches ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

from ermoe.data.order import Indices
from ermoe.errors import UserError

Answer = TypeVar("Answer")
Request = tuple[int, Indices]
"""An epoch, and which samples of it make a batch."""


def prepared(
    prepare: Callable[[Request], Answer], requests: list[Request], *, workers: int = 0, pin_memory: bool = False
) -> Iterator[Answer]:
    """What ``prepare`` makes of every request, in order; in this process without ``workers``."""
    if workers < 0:
        raise UserError(f"workers={workers}: need 0 (none) or more")
    reader = _Reader(prepare)
    answers: Iterable[Any] = (reader[request] for request in requests)
    if workers:
        # The sampler names whole batches, so a worker returns them finished and in order.
        settings: dict[str, Any] = {"batch_size": None, "num_workers": workers, "collate_fn": _as_it_is}
        answers = DataLoader(reader, sampler=requests, pin_memory=pin_memory, **settings)  # type: ignore[arg-type]
    for answer in answers:
        if isinstance(answer, UserError):
            raise answer
        yield answer


class _Reader(Dataset[Any]):
    """What a worker runs. It hands mistakes over as answers: raised there, they would arrive as tracebacks."""

    def __init__(self, prepare: Callable[[Request], Any]) -> None:
        self.prepare = prepare

    def __getitem__(self, request: Request) -> Any:
        try:
            return self.prepare(request)
        except UserError as mistake:
            return mistake


def _as_it_is(answer: Any) -> Any:
    return answer
