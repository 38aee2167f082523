"""What a step asks of every device of a cluster, on paper."""

import pytest

from ermoe.cli.main import main
from ermoe.errors import UserError
from ermoe.models.layouts import Layout, layouts, needs, seconds, size_of
from ermoe.models.presets import preset


@pytest.fixture(scope="module")
def size():
    return size_of(preset("paper-b16").build(device="meta"))


def test_a_model_is_read_off_without_weights(size):
    dim, hidden_dim, rank = 768, 3072, 504
    a_layer = 8 * (2 * rank * (dim + hidden_dim) + 2 * rank + dim + hidden_dim)
    assert size.experts == 6 * a_layer
    assert size.columns == 6 * 8 * dim * 56
    assert size.row == 6 * 2 * dim
    assert size.tokens == 197


def test_shares_of_memory_and_bytes_follow_the_formulas(size):
    total = size.experts + size.rest
    ddp, fsdp, ep, both = (
        needs(size, layout, images=8)
        for layout in (Layout("ddp", 8), Layout("fsdp", 8), Layout("ep", 8, 8), Layout("fsdp+ep", 8, 4))
    )
    assert (ddp.held, fsdp.held, both.held) == (16 * total, 2 * total, 2 * total)
    assert ep.held == 2 * size.experts + 16 * size.rest
    assert ep.sent["tokens"] == pytest.approx(16 * 6 * 2 * 768 * 197 * 8 * 7 / 8)
    assert both.sent["tokens"] == pytest.approx(ep.sent["tokens"] * (3 / 4) / (7 / 8))
    assert sum(ep.sent.values()) < sum(ddp.sent.values()) < sum(fsdp.sent.values())
    assert both.gathered < fsdp.gathered


def test_rows_that_stay_within_a_host_do_not_wait_for_the_network(size):
    pace = {"network": 1e9, "link": 1e12}
    within, across = (
        seconds(needs(size, layout, images=512), layout, 2, 4, **pace)
        for layout in (Layout("ep", 8, 4), Layout("ep", 8, 8))
    )
    assert within < across


def test_experts_are_shared_within_a_host_or_by_as_many_as_can(size):
    assert [(layout.parallel, layout.expert_processes) for layout in layouts(size, 16, 4)] == [
        ("ddp", 1), ("fsdp", 1), ("ep", 4), ("ep", 8), ("fsdp+ep", 4), ("fsdp+ep", 8),
    ]  # fmt: skip


def test_the_command_says_what_fits(capsys):
    assert main(["info", "paper-b16", "--cluster", "2x4", "--memory", "3"]) == 0
    shown = capsys.readouterr().out
    assert "none" in shown
    assert "fsdp+ep 4" in shown


@pytest.mark.parametrize("cluster", ["16", "16x", "0x8", "1x1", "ax8"])
def test_other_clusters_get_a_sentence(cluster, capsys):
    assert main(["info", "paper-b16", "--cluster", cluster]) == 2
    assert "such as 16x8" in capsys.readouterr().err


def test_a_dense_model_has_nothing_to_share_out():
    with pytest.raises(UserError, match="no experts to share out"):
        size_of(preset("vit-b16").build(device="meta"))
