"""What a sparse image tower starts from."""

from dataclasses import replace

import torch

from ermoe.retrieval.presets import recipe


def test_networks_of_a_given_image_tower_stay_in_sparse_blocks(tmp_path):
    dense = recipe("tiny-dense").build().visual.trunk.eval()
    torch.save(dense.state_dict(), tmp_path / "tower.pth")
    chosen = recipe("tiny-ermoe")
    chosen = replace(chosen, training=replace(chosen.training, seed=5))
    sparse = chosen.build(image_weights=str(tmp_path / "tower.pth")).visual.trunk.eval()
    image = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(sparse(image), dense(image))
