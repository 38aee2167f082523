"""The contrastive loss of towers under DDP, against one process that holds both halves of the batch."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from ermoe.retrieval.contrastive import contrastive_loss

TOLERANCE = 1e-6


class Towers(nn.Module):
    """Two towers and a scale, as small as can be."""

    def __init__(self):
        super().__init__()
        self.image, self.text = (nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5)) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, image, text):
        features = (nn.functional.normalize(tower(x), dim=-1) for tower, x in ((self.image, image), (self.text, text)))
        return *features, self.log_scale.exp()


def gradients(group):
    torch.manual_seed(0)
    model = Towers().double()
    twin = copy.deepcopy(model)
    image, text = torch.randn(2, 8, 6, dtype=torch.float64)
    own = slice(4 * group.rank, 4 * group.rank + 4)
    network = DistributedDataParallel(model)  # must live until the backward pass, which it takes part in
    loss = contrastive_loss(*network(image[own], text[own]), label_smoothing=0.1)
    loss.backward()
    image_GD, text_GD, scale = twin(image, text)
    logit_GG = scale * image_GD @ text_GD.mT
    rows, columns = (
        nn.functional.cross_entropy(part, torch.arange(8), label_smoothing=0.1) for part in (logit_GG, logit_GG.mT)
    )
    ((rows + columns) / 2).backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, rtol=0, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")
        assert float(mine.grad.abs().max()) > 1e-4, name
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    assert_close(mean / 2, ((rows + columns) / 2).detach())
