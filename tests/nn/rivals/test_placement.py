import pytest

from ermoe.nn.rivals.placement import sparse_blocks


@pytest.mark.parametrize(
    ("placement", "depth", "blocks"),
    [
        ("every-2", 12, [1, 3, 5, 7, 9, 11]),
        ("every-2", 8, [1, 3, 5, 7]),
        ("every-1", 3, [0, 1, 2]),
        ("every-3", 7, [2, 5]),
        ("last-2", 12, [9, 11]),
        ("last-2", 8, [5, 7]),
        ("last-1", 24, [23]),
    ],
)
def test_blocks(placement, depth, blocks):
    assert sparse_blocks(placement, depth) == blocks


@pytest.mark.parametrize(
    ("placement", "depth"), [("all", 12), ("every-0", 12), ("last-x", 12), ("last-7", 12), ("every-5", 4)]
)
def test_nonsense_is_refused(placement, depth):
    with pytest.raises(ValueError, match=f"placement='{placement}'"):
        sparse_blocks(placement, depth)
