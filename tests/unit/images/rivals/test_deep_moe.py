import pytest
import torch
from torch.testing import assert_close
from torchvision.models import ResNet, resnet18, resnet50
from torchvision.models.resnet import BasicBlock

from ermoe.images.rivals import DeepMoEStyle
from ermoe.images.rivals.deep_moe import embedding_network


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def batch(num_images=8):
    images = torch.randn(num_images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(num_images) % 2
    images[labels == 1, 0] += 2.0
    return images, labels


def small_resnet():
    """A ResNet-18 with half of its blocks."""
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=2)


def build(**options):
    return DeepMoEStyle(small_resnet(), embedding_dim=16, **options)


def test_a_gate_for_every_input_channel_of_every_convolution():
    output = DeepMoEStyle(resnet18(num_classes=2)).eval().decide(batch()[0])
    widths = [gate_NC.shape[1] for gate_NC in output.gates]
    assert widths == [64] * 5 + [128] * 4 + [256] * 4 + [512] * 3
    assert all((gate_NC >= 0).all() for gate_NC in output.gates)


def test_open_gates_leave_the_base_as_it_is():
    base = small_resnet().eval()
    model = DeepMoEStyle(base).eval()
    images, _ = batch()
    for block in model.blocks:
        block.gate1.forward = block.gate2.forward = lambda e: torch.ones(len(e), 1)
    assert_close(model(images), base(images))


def test_a_closed_gate_removes_its_channel():
    model = build().eval()
    images, _ = batch()
    block = model.blocks[0]
    with torch.no_grad():
        block.gate2.linear.weight[7] = 0
    expected = model(images)
    with torch.no_grad():
        block.block.conv2.weight[:, 7].normal_(std=100.0)
    assert torch.equal(model(images), expected)


def test_the_loss_term_by_term():
    model = build(gate_weight=0.01, embedding_weight=0.5)
    images, labels = batch()
    model.eval()
    output = model.decide(images)
    cross_entropy = torch.nn.functional.cross_entropy
    opened = sum(gate_NC.abs().sum() for gate_NC in output.gates) / len(images)
    expected = cross_entropy(output.logit_NK, labels) + 0.01 * opened
    assert_close(model.loss(images, labels), expected + 0.5 * cross_entropy(output.embedding_logit_NK, labels))


def test_training_learns_and_the_penalty_closes_gates():
    images, labels = batch()
    model = build(gate_weight=0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    opened, losses = sum(gate.sum() for gate in model.decide(images).gates), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model.loss(images, labels)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert sum(gate.sum() for gate in model.decide(images).gates) < opened


def test_the_second_stage_trains_the_network_and_not_the_gates():
    images, labels = batch()
    model = build()
    model.begin_second_stage()
    model.loss(images, labels).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not any("gate" in name or "embedding" in name for name in trained)
    assert any("conv1" in name for name in trained)


def test_inference_of_an_image_does_not_depend_on_the_others():
    model = build().eval()
    images, _ = batch()
    assert_close(model(images[:1]), model(images)[:1], rtol=0, atol=1e-5)


def test_the_embedding_network_halves_the_image_each_time():
    network = embedding_network(96, 5)
    strides = [m.stride for m in network if isinstance(m, torch.nn.Conv2d)]
    widths = [m.out_channels for m in network if isinstance(m, torch.nn.Conv2d)]
    assert strides == [(2, 2)] * 5
    assert widths == [32, 64, 96, 96, 96]


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="ResNet-18 or 34"):
        DeepMoEStyle(resnet50(num_classes=2))
    with pytest.raises(ValueError, match="num_convolutions=0"):
        build(num_convolutions=0)
