"""A sparse ViT trained in a loop of your own: four lines make the difference to any other model.

Run: python examples/train_in_plain_pytorch.py (seconds; the digits come with scikit-learn).
"""

import timm
import torch
import torch.nn.functional as F

import ermoe
from ermoe.data.images import digits

EPOCHS, BATCH, LAMBDA = 6, 64, 5e-5

torch.set_num_threads(1)  # so small a model gains nothing from more
torch.manual_seed(0)
train, test = digits()
dense = timm.create_model(
    "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, embed_dim=48, depth=4, num_heads=3, num_classes=10,
    class_token=False, global_pool="avg",
)  # fmt: skip
model = ermoe.upcycle(dense, num_experts=4, init="same")  # 1. experts in every second block

exempt = ermoe.no_weight_decay(model)  # 2. bases must keep their length
groups = [
    {"params": [p for n, p in model.named_parameters() if n not in exempt and p.ndim > 1], "weight_decay": 0.05},
    {"params": [p for n, p in model.named_parameters() if n in exempt or p.ndim <= 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=EPOCHS * -(-len(train) // BATCH))

for epoch in range(EPOCHS):
    model.train()
    for rows in torch.randperm(len(train)).split(BATCH):
        loss = F.cross_entropy(model(train.image[rows]), train.label[rows])
        loss = loss + LAMBDA * ermoe.orthogonality_loss(model)  # 3. no balancing loss, only this
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        ermoe.update_balance(model)  # 4. equal load, once a step
    ermoe.retract(model)  # and once an epoch: bases exactly orthonormal again
    model.eval()
    with torch.inference_mode():
        accuracy = (model(test.image).argmax(1) == test.label).float().mean()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy:.1%}")

assert accuracy > 0.5, "six epochs are enough for more than half of the digits"
