"""Which blocks of a transformer become sparse."""

from __future__ import annotations


def sparse_blocks(placement: str, depth: int) -> list[int]:
    """Indices of the sparse blocks: "every-n" is every n-th block, "last-n" the last n odd ones (V-MoE's words).

    >>> sparse_blocks("every-2", 12), sparse_blocks("last-2", 12)
    ([1, 3, 5, 7, 9, 11], [9, 11])
    """
    kind, _, number = placement.partition("-")
    if kind not in ("every", "last") or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"placement={placement!r}: use 'every-2', 'last-2' or the like")
    n = int(number)
    blocks = list(range(n - 1, depth, n)) if kind == "every" else list(range(1, depth, 2))[-n:]
    if not blocks or (kind == "last" and len(blocks) < n):
        raise ValueError(f"placement={placement!r}: a transformer of {depth} blocks has too few for it")
    return blocks
