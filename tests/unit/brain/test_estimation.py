"""What training does to a network's input."""

import torch

from ermoe.brain.estimation import hidden_cubes


def test_hidden_cubes_are_whole_cubes_and_about_the_share() -> None:
    torch.manual_seed(0)
    hidden = hidden_cubes(torch.ones(8, 10, 8, 6, dtype=torch.bool), 4, 0.3)
    assert hidden.shape == (8, 10, 8, 6)
    cube = hidden[:, :4, :4, :4].flatten(1)
    assert (cube.all(1) | ~cube.any(1)).all()
    assert 0.15 < hidden.float().mean() < 0.45
