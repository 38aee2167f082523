"""What sparse models start from, and how files are read for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from ermoe.images.predicting import predict
from ermoe.images.presets import recipe
from ermoe.train.compute import Compute


@pytest.mark.parametrize("method", ["ermoe", "gate"])
def test_networks_of_given_weights_stay_in_sparse_blocks(method, tmp_path):
    dense = recipe("digits-dense").build(10).eval()
    torch.save(dense.state_dict(), tmp_path / "dense.pth")
    chosen = recipe(f"digits-{method}")
    chosen = replace(chosen, training=replace(chosen.training, seed=5))
    sparse = chosen.build(10, weights=str(tmp_path / "dense.pth")).eval()
    image = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(sparse(image), dense(image))


def test_workers_read_the_same_images_for_a_prediction(tmp_path):
    model = recipe("digits-dense").build(10)
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(tmp_path / "photo.png")
    paths = [str(tmp_path / name) for name in ("photo.png", "nothing.png", "photo.png")]
    alone, ahead = (predict(model, paths, list("abcdefghij"), compute=Compute(workers=n)) for n in (0, 1))
    assert alone == ahead
    (single,) = predict(model, paths[0], list("abcdefghij"))
    assert single.classes == alone[0].classes
    assert [prediction.problem is None for prediction in ahead] == [True, False, True]
