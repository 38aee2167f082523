"""A single-gated mixture of experts in the style of Royer et al. 2023 (no code of theirs is public).

A base network classifies every image. Images of which it is not sure go on to one expert, chosen by one gate on the
base network's features, and the two predictions are averaged. The method in its own order:

1. train the base network;
2. `start_from_clusters`: K-means of the base embeddings becomes the gate, copies of the base's last stages the experts;
3. `begin_second_stage`, and train every expert on the images that the gate gives it.

Or all of it jointly, with `loss`. Under DDP that needs ``find_unused_parameters``: a batch may leave an expert without
images.

Letters: N images, Z embedding width, K experts, C classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import ResNet

from ermoe.errors import UserError

_STAGES = ("layer1", "layer2", "layer3", "layer4")


@dataclass(slots=True)
class SingleGatedOutput:
    """What the network decided: class log-probabilities, the gate's choice, and who left early."""

    log_prob_NC: Tensor
    base_logit_NC: Tensor
    expert_N: Tensor
    exited_N: Tensor


class SingleGatedMoEStyle(nn.Module):
    """p(y|x) = p₀ if max p₀ > θ, else (p₀ + p_e) / 2 with the expert e that the gate likes best.

    In training no image leaves early, and experts learn through the averaged prediction, so each is pushed towards
    what the base gets wrong. Experts keep the base's batch-norm statistics: their shares of a batch are too small for
    statistics of their own. The base is copied, not changed.

    Args:
        base: a torchvision ResNet, trained or not.
        num_experts: K.
        own_stages: how many of the four residual stages every expert has of its own; the ones before are the base's.
        exit_threshold: θ. At 1 every image meets an expert, at 0 none does.

    >>> from torchvision.models import resnet18
    >>> model = SingleGatedMoEStyle(resnet18(num_classes=10), num_experts=3).eval()
    >>> model(torch.randn(2, 3, 32, 32)).exp().sum(-1).allclose(torch.ones(2))
    True
    """

    def __init__(self, base: ResNet, *, num_experts: int = 4, own_stages: int = 1, exit_threshold: float = 0.9) -> None:
        super().__init__()
        if num_experts < 1:
            raise UserError(f"num_experts={num_experts}: need at least one expert")
        if not 1 <= own_stages <= len(_STAGES):
            raise UserError(f"own_stages={own_stages}: a ResNet has {len(_STAGES)} stages; use 1 to {len(_STAGES)}")
        if not 0 <= exit_threshold <= 1:
            raise UserError(f"exit_threshold={exit_threshold}: it is compared with a probability; use 0 to 1")
        base = copy.deepcopy(base)
        shared, own = _STAGES[:-own_stages], _STAGES[-own_stages:]
        self.trunk = nn.Sequential(base.conv1, base.bn1, base.relu, base.maxpool, *(getattr(base, s) for s in shared))
        self.base_tail = nn.Sequential(*(getattr(base, stage) for stage in own), base.avgpool, nn.Flatten())
        self.base_head = base.fc
        self.expert_tails = nn.ModuleList(copy.deepcopy(self.base_tail) for _ in range(num_experts))
        self.expert_heads = nn.ModuleList(copy.deepcopy(base.fc) for _ in range(num_experts))
        self.gate = nn.Linear(base.fc.in_features, num_experts)
        self.exit_threshold = exit_threshold
        self.num_classes = base.fc.out_features
        self.base_is_frozen = False
        self.train(base.training)

    @property
    def num_experts(self) -> int:
        """Number of experts, K."""
        return len(self.expert_tails)

    def train(self, mode: bool = True) -> SingleGatedMoEStyle:
        """Training mode; batch norms of the experts, or all once the base is frozen, keep the base's statistics."""
        super().train(mode)
        for module in (self if self.base_is_frozen else self.expert_tails).modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def begin_second_stage(self) -> None:
        """The experts' turn: base and gate no longer change, so every image keeps its expert."""
        self.base_is_frozen = True
        for module in (self.trunk, self.base_tail, self.base_head, self.gate):
            module.requires_grad_(False)
        self.train(self.training)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities of the classes, (N, C); without a classifier the base embeddings, (N, Z)."""
        if not self.num_classes:
            embedding_NZ: Tensor = self.base_tail(self.trunk(images))
            return embedding_NZ
        return self.decide(images).log_prob_NC

    def reset_classifier(self, num_classes: int = 0) -> None:
        """From now on the network returns base embeddings, for linear probes."""
        if num_classes:
            raise UserError(f"num_classes={num_classes}: build a new network for other classes; 0 returns embeddings")
        self.num_classes = 0

    def decide(self, images: Tensor) -> SingleGatedOutput:
        """The prediction and how it came about."""
        shared = self.trunk(images)
        embedding_NZ = self.base_tail(shared)
        base_logit_NC = self.base_head(embedding_NZ)
        expert_N = self.gate(embedding_NZ).argmax(-1)
        base_log_prob_NC = base_logit_NC.log_softmax(-1)
        confidence_N = base_log_prob_NC.detach().amax(-1).exp()
        exited_N = torch.zeros_like(expert_N, dtype=torch.bool)
        if not self.training and self.exit_threshold < 1:
            exited_N = confidence_N > self.exit_threshold
        log_prob_NC = base_log_prob_NC.clone()
        for expert in range(self.num_experts):
            own = torch.nonzero((expert_N == expert) & ~exited_N).squeeze(1)
            if len(own):
                expert_log_prob = self._expert(expert, shared[own])
                log_prob_NC[own] = torch.logaddexp(base_log_prob_NC[own], expert_log_prob) - math.log(2)  # the mean
        return SingleGatedOutput(log_prob_NC, base_logit_NC, expert_N, exited_N)

    def _expert(self, expert: int, shared: Tensor) -> Tensor:
        logit: Tensor = self.expert_heads[expert](self.expert_tails[expert](shared))
        return logit.log_softmax(-1)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropies of the averaged prediction and of the base; the choice is hard, so the gate gets nothing."""
        output = self.decide(images)
        return F.nll_loss(output.log_prob_NC, labels) + F.cross_entropy(output.base_logit_NC, labels)

    @torch.no_grad()
    def start_from_clusters(self, batches: Iterable[Tensor], *, seed: int = 0) -> Tensor:
        """Sets the gate to the nearest of K centroids of the base embeddings; experts become copies of the base.

        ``batches`` are images. Returns the cluster of each, in order, (N,). A linear gate can be the nearest centroid
        exactly: argmin ‖z − c‖² = argmax 2 c·z − ‖c‖².
        """
        from sklearn.cluster import KMeans  # which takes seconds to import

        was_training = self.training
        self.eval()
        embeddings = [self.base_tail(self.trunk(images)).float().cpu() for images in batches]
        self.train(was_training)
        embedding_NZ = torch.cat(embeddings) if embeddings else torch.empty(0, self.gate.in_features)
        if len(embedding_NZ) < self.num_experts:
            raise UserError(
                f"{len(embedding_NZ)} images cannot be split into {self.num_experts} clusters: give at least one "
                "image per expert"
            )
        means = KMeans(self.num_experts, n_init=10, random_state=seed).fit(embedding_NZ.numpy())
        centroid_KZ = torch.from_numpy(means.cluster_centers_).float()
        self.gate.weight.copy_(2 * centroid_KZ)
        self.gate.bias.copy_(-centroid_KZ.square().sum(-1))
        for tail, head in zip(self.expert_tails, self.expert_heads, strict=True):
            tail.load_state_dict(self.base_tail.state_dict())
            head.load_state_dict(self.base_head.state_dict())
        return torch.from_numpy(means.labels_).long()
