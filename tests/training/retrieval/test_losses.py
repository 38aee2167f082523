"""The contrastive loss: golden vectors of open_clip, and two processes against one."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ermoe.retrieval.losses import contrastive_loss

GOLDEN = Path(os.environ.get("ERMOE_DATA", "")) / "golden"
needs_data = pytest.mark.skipif("ERMOE_DATA" not in os.environ, reason="set ERMOE_DATA to the folder of test data")
TESTS = Path(__file__).parents[2]


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


def test_two_processes_have_the_gradients_of_one_large_batch(tmp_path):
    script = str(Path(__file__).with_name("two_processes.py"))
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    complaints = [process.communicate(timeout=280)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(complaints)[-4000:]
