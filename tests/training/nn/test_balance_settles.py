"""Offsets bring loads to equality over a run, without a loss."""

import pytest
import torch

from ermoe.nn import EigenMoE, update_balance
from support.mixtures import mixture


def load_cv2(count_E):
    count_E = count_E.double()
    return (count_E.var(correction=0) / count_E.mean() ** 2).item()


@pytest.mark.no_cover
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize(
    ("score", "spread"), [("eigenbasis", 1.0), ("eigenbasis", 0.1), ("prototype", 0.5), ("energy", 0.5), ("logit", 0.5)]
)
def test_offsets_reach_equal_load_without_oscillating(score, spread, top_k):
    generator = torch.Generator().manual_seed(0)
    layer = EigenMoE(32, 32, score=score, top_k=top_k, generator=generator, threshold=0.0)
    with torch.no_grad():
        layer.router.balance.offset_E[0] = 3.0  # every token goes to expert 0 at the start
    history = []
    for _ in range(300):
        x, context = mixture(generator, 2048, 32, spread)
        routing = layer.route(x, context)
        layer.router.observe(routing)
        history.append(load_cv2(routing.count_E))
        update_balance(layer)
    assert history[0] > 1 / top_k / 2
    assert max(history[-100:]) < 0.02
    settled = next(i for i in range(300) if history[i] < 0.02)
    assert max(history[settled + 10 :]) < 0.03  # once there it stays there
