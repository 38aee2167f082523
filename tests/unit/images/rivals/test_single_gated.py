import pytest
import torch
from torch.testing import assert_close
from torchvision.models import ResNet, resnet18
from torchvision.models.resnet import BasicBlock

from ermoe.images.rivals import SingleGatedMoEStyle


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def coloured_images(per_class=4, size=32):
    """Two classes that differ in shape, in two colours: clusters follow the colour, classes the shape."""
    labels = torch.arange(4 * per_class) % 2
    colours = torch.arange(4 * per_class) // 2 % 2
    images = 0.1 * torch.randn(len(labels), 3, size, size, generator=torch.Generator().manual_seed(0))
    for image, label, colour in zip(images, labels.tolist(), colours.tolist(), strict=True):
        image[2 * colour] += 4.0
        image[:, : size // 2] += 1.0 * label
    return images, labels, colours


def build(**options):
    """On a ResNet-18 with half of its blocks."""
    return SingleGatedMoEStyle(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=2), num_experts=2, **options)


def test_experts_start_as_copies_of_the_base_and_change_nothing():
    model = SingleGatedMoEStyle(resnet18(num_classes=2), exit_threshold=1.0).eval()
    images, _, _ = coloured_images()
    output = model.decide(images)
    assert not output.exited_N.any()
    assert_close(output.log_prob_NC, output.base_logit_NC.log_softmax(-1))


def test_the_gate_starts_as_the_nearest_centroid():
    model = build()
    images, _, colours = coloured_images()
    was_training = model.training
    clusters = model.start_from_clusters(images.split(5), seed=0)
    assert model.training == was_training
    output = model.eval().decide(images)
    assert torch.equal(output.expert_N, clusters)
    agreement = (clusters == colours).float().mean()
    assert max(agreement, 1 - agreement) == 1
    assert torch.equal(model.start_from_clusters(images.split(24), seed=0), clusters)


def test_sure_images_leave_early_and_the_others_are_averaged():
    model = build().eval()
    images, _, _ = coloured_images()
    with torch.no_grad():
        for head in model.expert_heads:
            head.bias.add_(torch.tensor([1.0, -1.0]))
        model.exit_threshold = float(model.decide(images).base_logit_NC.softmax(-1).amax(-1).mean())
        output = model.decide(images)
    base = output.base_logit_NC.softmax(-1)
    assert torch.equal(output.exited_N, base.amax(-1) > model.exit_threshold)
    assert 0 < int(output.exited_N.sum()) < len(images)
    assert_close(output.log_prob_NC[output.exited_N].exp(), base[output.exited_N])
    shared = model.trunk(images)
    for index in torch.nonzero(~output.exited_N).flatten().tolist():
        expert = int(output.expert_N[index])
        logit = model.expert_heads[expert](model.expert_tails[expert](shared[index : index + 1]))
        assert_close(output.log_prob_NC[index].exp(), (base[index] + logit.softmax(-1)[0]) / 2)


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_threshold_at_its_ends(threshold, share):
    model = build(exit_threshold=threshold).eval()
    assert model.decide(coloured_images()[0]).exited_N.float().mean() == share


def test_inference_of_an_image_does_not_depend_on_the_others():
    model = build(exit_threshold=0.5).eval()
    images, _, _ = coloured_images()
    assert_close(model(images[:1]), model(images)[:1], rtol=0, atol=1e-5)


def test_the_pipeline_learns():
    """Base first, then the clusters, then each expert by itself; the expert sees only its own images."""
    images, labels, _ = coloured_images()
    model = build(own_stages=1)
    optimizer = torch.optim.SGD([*model.trunk.parameters(), *model.base_tail.parameters()], lr=0.05)
    first = None
    for _ in range(6):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model.decide(images).base_logit_NC, labels)
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
    clusters = model.start_from_clusters([images], seed=0)
    assert loss.item() < first
    model.begin_second_stage()
    base = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("expert")}
    for expert in range(model.num_experts):
        own = clusters == expert
        assert (model.decide(images[own]).expert_N == expert).all()
        own_parameters = [*model.expert_tails[expert].parameters(), *model.expert_heads[expert].parameters()]
        optimizer = torch.optim.SGD(own_parameters, lr=0.02)
        before = model.loss(images[own], labels[own]).item()
        for _ in range(3):
            optimizer.zero_grad()
            model.loss(images[own], labels[own]).backward()
            optimizer.step()
        assert model.loss(images[own], labels[own]).item() < before
    assert all(torch.equal(model.state_dict()[name], value) for name, value in base.items())


def test_joint_training_reaches_everything_but_the_gate():
    images, labels, _ = coloured_images()
    model = build(own_stages=2)
    model.start_from_clusters([images])
    model.loss(images, labels).backward()
    learning = [p for name, p in model.named_parameters() if not name.startswith("gate.")]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learning)


def test_a_single_image_trains_its_expert():
    model = build()
    images, labels, _ = coloured_images()
    model.base_tail.eval()  # 32 pixels leave one value per channel, of which the base's batch norm cannot learn either
    assert model.loss(images[:1], labels[:1]).isfinite()


@pytest.mark.parametrize("options", [{"num_experts": 0}, {"own_stages": 5}, {"own_stages": 0}, {"exit_threshold": 1.5}])
def test_nonsense_is_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        SingleGatedMoEStyle(resnet18(num_classes=2), **options)


def test_fewer_images_than_clusters_are_refused():
    with pytest.raises(ValueError, match="1 images cannot be split into 2 clusters"):
        build().start_from_clusters([torch.zeros(1, 3, 32, 32)])


def test_state_survives_saving():
    images, _, _ = coloured_images()
    model, other = build().eval(), build().eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images), model(images))
