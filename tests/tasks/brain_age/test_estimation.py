"""What training does to a network's input: blends of people, hidden cubes."""

import torch

from ermoe.tasks.brain_age.estimation import blends, hidden_cubes


def test_blended_ages_belong_to_blended_volumes() -> None:
    age_B = torch.tensor([20.0, 40.0, 60.0, 80.0])
    volume = age_B.view(4, 1, 1, 1, 1).expand(4, 2, 3, 3, 3)  # a volume that shows its age
    mask = torch.zeros(4, 3, 3, 3, dtype=torch.bool)
    mask[torch.arange(4), 0, 0, torch.tensor([0, 1, 2, 0])] = True
    torch.manual_seed(3)
    mixed, union, mixed_age_B = blends(volume, mask, age_B)
    torch.testing.assert_close(mixed[:, 0, 0, 0, 0], mixed_age_B)
    assert not torch.allclose(mixed_age_B, age_B)
    assert mixed_age_B.min() >= 20
    assert mixed_age_B.max() <= 80
    assert (union & mask).equal(mask)
    assert union.flatten(1).sum(1).max() <= 2


def test_blends_are_a_function_of_the_generator() -> None:
    volume, mask = torch.randn(3, 1, 2, 2, 2), torch.ones(3, 2, 2, 2, dtype=torch.bool)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(blends(volume, mask, torch.tensor([30.0, 50.0, 70.0])))
    assert drawn[0][0].equal(drawn[1][0])
    assert drawn[0][2].equal(drawn[1][2])


def test_hidden_cubes_are_whole_cubes_and_about_the_share() -> None:
    torch.manual_seed(0)
    hidden = hidden_cubes(torch.ones(8, 10, 8, 6, dtype=torch.bool), 4, 0.3)
    assert hidden.shape == (8, 10, 8, 6)
    cube = hidden[:, :4, :4, :4].flatten(1)
    assert (cube.all(1) | ~cube.any(1)).all()
    assert 0.15 < hidden.float().mean() < 0.45
