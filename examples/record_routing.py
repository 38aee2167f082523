"""See how a model routes: make a ViT sparse, record a pass over labelled images, read the measures.

    python examples/record_routing.py

Prints a table and writes routing.html into the current folder. No training, no download, a few seconds.
"""

import torch
from timm.models import VisionTransformer

import ermoe
from ermoe.data.images import digits

torch.manual_seed(0)
torch.set_num_threads(1)  # so small a model gains nothing from more
dense = VisionTransformer(img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=4, num_heads=4)
model = ermoe.upcycle(dense.eval(), num_experts=8, top_k=2)
train, test = digits()


@torch.no_grad()
def record(previous=None):
    """One pass over the held-out digits; recording changes no output and keeps no batch."""
    with ermoe.record_routing(model, classes=10, previous=previous) as routing:
        for image, label in zip(test.image.split(200), test.label.split(200), strict=True):
            routing.labels(label)
            model(image)
    return routing


before = record()
print("As upcycled:\n")
print(before.table())

# Equal load before any training, from unlabelled images; `fluctuation` is the share of tokens that changed an expert.
ermoe.calibrate(model, train.image.split(200))
after = record(previous=before)
print("\nCalibrated:\n")
print(after.table())

layer = after.tallies["blocks.1.mlp"]
print("\nFallback rate at other thresholds:", {t: round(layer.fallback_rate(t), 3) for t in (0.3, 0.5, 0.7, 0.9)})
print("Report:", after.report("routing.html", title="An upcycled ViT on digits"))
