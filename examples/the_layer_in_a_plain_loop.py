"""The layer alone, in a transformer block and a training loop written by hand.

    python examples/the_layer_in_a_plain_loop.py

Reads scikit-learn's digits pixel row by pixel row: eight tokens of eight pixels. Trains for a few seconds.
"""

import torch
import torch.nn.functional as F
from torch import nn

import ermoe
from ermoe.data.images import digits
from ermoe.nn import ContextAttention, context

DIM, EPOCHS, BATCH = 48, 6, 32


class Block(nn.Module):
    """Attention, then a mixture of experts that is also told where each token looked."""

    def __init__(self, generator):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = ContextAttention(DIM, num_heads=4)
        self.moe = ermoe.EigenMoE(DIM, num_experts=6, top_k=2, generator=generator)

    def forward(self, x):
        attended, alpha = self.attention(self.norm1(x), need_weights=True)
        x = x + attended
        z = self.norm2(x)
        return x + self.moe(z, context(alpha, z))


class RowReader(nn.Module):
    """A classifier with two such blocks."""

    def __init__(self, generator):
        super().__init__()
        self.embed = nn.Linear(8, DIM)
        self.position = nn.Parameter(torch.randn(8, DIM, generator=generator))
        self.blocks = nn.Sequential(Block(generator), Block(generator))
        self.head = nn.Linear(DIM, 10)

    def forward(self, image):
        x = self.embed(image.squeeze(1)) + self.position
        return self.head(self.blocks(x).mean(1))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, test = digits()
    model = RowReader(torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        for index in torch.randperm(len(train)).split(BATCH):
            loss = F.cross_entropy(model(train.image[index]), train.label[index])
            loss = loss + 5e-5 * ermoe.orthogonality_loss(model)  # keeps the experts' bases orthonormal
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ermoe.update_balance(model)  # equal load without a loss, once a step
        ermoe.retract(model)  # exactly orthonormal again, once an epoch
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad(), ermoe.record_routing(model, classes=10) as routing:
        routing.labels(test.label)
        accuracy = (model(test.image).argmax(-1) == test.label).float().mean()
    print(f"held-out accuracy {accuracy:.1%}\n")
    print(routing.table())


if __name__ == "__main__":
    main()
