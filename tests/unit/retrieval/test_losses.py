"""The contrastive loss: golden vectors of open_clip. Two processes: training/test_two_processes.py."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ermoe.retrieval.contrastive import contrastive_loss

GOLDEN = Path(os.environ.get("ERMOE_DATA", "")) / "golden"
needs_data = pytest.mark.skipif("ERMOE_DATA" not in os.environ, reason="set ERMOE_DATA to the folder of test data")


@needs_data
def test_loss_and_gradients_of_open_clip():
    golden = np.load(GOLDEN / "clip_loss_A.npz")
    image, text = (torch.from_numpy(golden[f"{name}_features"]).requires_grad_() for name in ("image", "text"))
    log_scale = torch.tensor(float(golden["log_logit_scale"]), requires_grad=True)
    scale = log_scale.exp()
    scale.retain_grad()
    loss = contrastive_loss(image, text, scale)
    loss.backward()
    found = {"loss": loss, "grad_image": image.grad, "grad_text": text.grad, "grad_logit_scale": scale.grad}
    found["grad_log_logit_scale"] = log_scale.grad
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor.detach().numpy(), golden[name], atol=1e-6, err_msg=name)


def test_label_smoothing_is_that_of_cross_entropy():
    image, text = torch.nn.functional.normalize(torch.randn(2, 6, 4), dim=-1)
    logit = 7 * image @ text.mT
    rows, columns = (
        torch.nn.functional.cross_entropy(part, torch.arange(6), label_smoothing=0.1) for part in (logit, logit.mT)
    )
    torch.testing.assert_close(contrastive_loss(image, text, 7.0, label_smoothing=0.1), (rows + columns) / 2)
