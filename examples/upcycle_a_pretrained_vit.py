"""A pretrained ViT made sparse: the same outputs, equal load without training, then saved, merged and exported.

Run: python examples/upcycle_a_pretrained_vit.py (half a minute; nothing is downloaded).
"""

import tempfile

import timm
import torch
from sklearn.datasets import load_sample_images

import ermoe

torch.set_num_threads(1)  # so small a model gains nothing from more
torch.manual_seed(0)

# With internet access: timm.create_model("vit_base_patch16_224", pretrained=True). A checkpoint on disk, whoever wrote
# it, goes in with ermoe.load_weights(dense, "vit_b_16.pth"). Here: a small one with random weights, which is as good.
dense = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10).eval()

photographs = torch.stack([torch.tensor(image).permute(2, 0, 1) for image in load_sample_images().images])
patches = (photographs / 127.5 - 1).unfold(2, 224, 67).unfold(3, 224, 52)
images = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 224, 224)  # crops of two photographs
calibration, test = images[::2], images[1::2]

model = ermoe.upcycle(dense, num_experts=8, top_k=2)
with torch.inference_mode():
    before, after = dense(test), model(test)
print(f"largest difference of the outputs: {(after - before).abs().max() / before.std():.1e} of their spread")
assert torch.equal(after.argmax(1), before.argmax(1))

for name, layer in ermoe.calibrate(model, calibration.split(8)).items():
    print(f"{name}: load CV² {layer.load_cv2:.4f} after calibration on {layer.num_tokens} tokens")

for title, counted in (("dense", ermoe.count(dense, 224)), ("sparse", ermoe.count(model, 224))):
    print(
        f"{title}: {counted.total_parameters / 1e6:.1f} M parameters, {counted.active_parameters / 1e6:.1f} M active, "
        f"{counted.multiply_adds.total / 1e9:.2f} G multiply-adds per image"
    )

with tempfile.TemporaryDirectory() as folder:
    ermoe.save(model, folder)
    again = ermoe.load(folder).eval()
    with torch.inference_mode():
        assert torch.equal(again(test), model(test))
    exported = ermoe.export(model, f"{folder}/model.pt2", image_size=224, dynamic_batch=False)
    print(f"exported for torch without ermoe: outputs within {exported.difference:.1e}")

merged = ermoe.merge(model)
with torch.inference_mode():
    print(f"merged for inference: outputs within {(merged(test) - model(test)).abs().max() / before.std():.1e}")

ermoe.freeze(model, "backbone")  # ready to fine-tune experts and head alone
print(f"{sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6:.1f} M parameters would learn")
