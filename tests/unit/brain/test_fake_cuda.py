"""On a GPU that is only pretended: nothing of the brain's networks, heads and predictions stays behind on the CPU.

A FakeTensorMode knows shapes, types and devices. It raises where tensors of two devices meet, and where the host would
wait for a value of the GPU.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ermoe.brain.ages import AgeBins, AgeHead, AgeRegression
from ermoe.brain.batches import ScanSet, VolumeBatch
from ermoe.brain.estimation import Estimation, Lesson, hidden_cubes
from ermoe.brain.learning import build
from ermoe.brain.model import BrainAgeModel
from ermoe.brain.recipes import CHANNELS, BrainRecipe, recipe, reduction
from ermoe.train.compute import Compute
from support.tiny_brains import BallCache, people

# No graph, and no pretended tensor, holds grouped products in float32 before that.
pytestmark = pytest.mark.skipif(torch.__version__ < (2, 15), reason="needs torch 2.15")
METHODS = ("ermoe", "ermoe-context", "vit3d", "sfcn", "swin3d")
HEADS: dict[str, AgeHead] = {
    "soft labels": AgeBins(15, 95, sigma=4.0, l1=1.0),
    "hard labels": AgeBins(15, 95, labels="hard", l1=0.1),
    "regression": AgeRegression(60.0, 15.0),
}


@pytest.fixture
def pretended() -> Iterator[FakeTensorMode]:
    """The mode; modules that are moved within it get pretended parameters."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield FakeTensorMode()
    torch.__future__.set_overwrite_module_params_on_conversion(before)


def on_cuda(network: nn.Module, mode: FakeTensorMode) -> nn.Module:
    mode.allow_non_fake_inputs = True
    with mode:
        network.to("cuda")
    mode.allow_non_fake_inputs = False
    return network


def volumes(chosen: BrainRecipe, num: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and mask on the pretended GPU; to be called within the mode."""
    shape = [-(-edge // reduction(chosen.input)) for edge in chosen.preprocessing.shape]
    seen = torch.randn(num, CHANNELS[chosen.input], *shape, device="cuda")
    return seen, torch.ones(num, *shape, dtype=torch.bool, device="cuda")


@pytest.mark.parametrize("method", METHODS)
def test_networks_answer_where_they_are(method: str, pretended: FakeTensorMode) -> None:
    if method == "swin3d":
        pytest.importorskip("monai")
    chosen, head = recipe("tiny", method), HEADS["soft labels"]
    network = on_cuda(build(chosen, head).eval(), pretended)
    with pretended, torch.no_grad():
        seen, mask = volumes(chosen)
        # Which tokens of a masked volume go to an expert is a matter of values, which a pretended GPU has not.
        output_BK = network(seen, None if chosen.has_experts else mask)
    assert output_BK.shape == (2, head.num_outputs)
    assert output_BK.device.type == "cuda"


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_losses_and_ages_need_no_wait(head: AgeHead, pretended: FakeTensorMode) -> None:
    with pretended:
        output_BK = torch.randn(3, head.num_outputs, device="cuda")
        loss, age_B = head.loss(output_BK, 60 + torch.randn(3, device="cuda")), head.age(output_BK)
    assert (loss.shape, loss.device.type) == ((), "cuda")
    assert (age_B.shape, age_B.device.type) == ((3,), "cuda")


def test_a_training_step_hides_cubes_and_adds_noise_there(pretended: FakeTensorMode) -> None:
    chosen, head = recipe("tiny", "vit3d"), HEADS["soft labels"]
    assert chosen.drop_cubes > 0
    assert chosen.input_noise > 0
    network = on_cuda(build(chosen, head).eval(), pretended)
    task = Estimation(Lesson(network, head, ScanSet(BallCache(), people(2), chosen.input)), chosen, Compute())
    with pretended, torch.no_grad():
        seen, mask = volumes(chosen)
        loss = task.loss(network, VolumeBatch(seen, mask, 60 + torch.randn(2, device="cuda")))
        hidden = hidden_cubes(mask, 2, 0.5)
    assert loss.device.type == "cuda"
    assert (hidden.shape, hidden.device.type) == (mask.shape, "cuda")


def test_a_scan_from_the_cpu_is_judged_by_networks_on_the_gpu(pretended: FakeTensorMode) -> None:
    chosen, head = recipe("tiny", "vit3d"), AgeBins(15, 95, sigma=4.0)
    networks = {
        f"fold-{seed}": on_cuda(
            build(replace(chosen, training=replace(chosen.training, seed=seed)), head).eval(), pretended
        )
        for seed in range(2)
    }
    model = BrainAgeModel(
        networks=networks, head=head, input=chosen.input, preprocessing=chosen.preprocessing,
        patch_size=chosen.patch_size, parts={}, age_range=(20.0, 90.0), mask_sources=("dseg",), calibration=None,
        calibration_of_fold={}, temperature=1.0, facts={},
    )  # fmt: skip
    with pretended:
        seen, mask = (part.cpu() for part in volumes(chosen, 1))
        output_FBK = model.outputs(seen, mask, list(networks))
        ages = model.ages(output_FBK)
    assert (output_FBK.shape, output_FBK.device.type) == ((2, 1, head.num_outputs), "cpu")
    assert ages.shape == (1,)
