"""Small backbones of every family, with weights under which an error in a feed-forward network shows."""

import functools

import timm
import torch
import torch.nn.functional as F
import torchvision
from sklearn.datasets import load_sample_images
from torch import nn

SMALL = {"embed_dim": 64, "num_heads": 4, "depth": 4, "num_classes": 10}

# timm architecture -> what makes it small, and the size of its images
TIMM = {
    "vit_tiny_patch16_224": ({"depth": 4, "num_classes": 10, "img_size": 64}, 64),
    "vit_small_patch32_224": ({**SMALL, "img_size": 96}, 96),
    "vit_small_patch8_224": ({**SMALL, "img_size": 32}, 32),
    "deit_tiny_distilled_patch16_224": ({**SMALL, "img_size": 64}, 64),
    "deit3_small_patch16_224": ({**SMALL, "img_size": 64}, 64),
    "vit_small_patch14_dinov2": ({**SMALL, "img_size": 56}, 56),
    "vit_small_patch14_reg4_dinov2": ({**SMALL, "img_size": 56, "dynamic_img_size": True}, 70),
    "vit_giant_patch14_dinov2": ({**SMALL, "img_size": 56, "mlp_ratio": 5.25}, 56),  # SwiGLU, both maps in one
    "vit_base_patch16_clip_quickgelu_224": ({**SMALL, "img_size": 64}, 64),
    "vit_base_patch16_siglip_224": ({**SMALL, "img_size": 64}, 64),
    "vit_base_patch16_rpn_224": ({**SMALL, "img_size": 64}, 64),  # post-norm: refused
    "vit_base_patch16_xp_224": ({**SMALL, "img_size": 64}, 64),  # parallel: refused
    "test_vit": ({"num_classes": 10, "img_size": 64}, 64),
    "test_vit2": ({"num_classes": 10}, 96),
    "test_vit4": ({"num_classes": 10}, 96),
    "eva02_tiny_patch14_224": ({**SMALL, "img_size": 56}, 56),  # RoPE and SwiGLU, both maps in one
    "eva02_base_patch16_clip_224": ({**SMALL, "img_size": 64}, 64),  # SwiGLU with a norm inside
    "vit_small_patch16_dinov3": ({**SMALL, "img_size": 64}, 64),
    "vit_small_plus_patch16_dinov3": ({**SMALL, "img_size": 64}, 64),  # SwiGLU in two maps
    "vit_small_patch16_rope_mixed_224": ({**SMALL, "img_size": 64}, 64),
    "beitv2_base_patch16_224": ({**SMALL, "img_size": 64}, 64),  # relative positions
    "samvit_base_patch16": ({**SMALL, "img_size": 96, "window_size": 4, "global_attn_indexes": (1,)}, 96),  # windows
    "naflexvit_base_patch16_map": ({**SMALL, "pos_embed_grid_size": (4, 4)}, 64),
    "eva02_small_patch14_224": ({**SMALL, "img_size": 56, "use_naflex": True}, 56),
    "vit_base_patch32_224": ({**SMALL, "img_size": 96, "features_only": True, "out_indices": (1, 3)}, 96),
}
REFUSED = ("vit_base_patch16_rpn_224", "vit_base_patch16_xp_224")
ACCEPTED = [name for name in TIMM if name not in REFUSED]


def build(name):
    """A backbone by name, in evaluation mode, with perturbed weights; and the size of its images."""
    torch.manual_seed(0)
    if name == "torchvision":
        model, size = torchvision.models.VisionTransformer(32, 8, 4, 4, 64, 128, num_classes=10), 32
    elif name == "hugging face":
        model, size = hugging_face(), 32
    else:
        options, size = TIMM[name]
        model = timm.create_model(name, **options)
    return perturb(model).eval(), size


def hugging_face(**options):
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(**small, image_size=32, patch_size=8, num_labels=10, **options)
    return ViTForImageClassification(config)


def perturb(model, seed=0, scale=0.05):
    """Moves every parameter, and LayerScale to order one, so that no part of the model is nearly switched off."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "gamma" in name or ".ls" in name:
                parameter.copy_(0.7 + 0.3 * noise.abs())
            else:
                parameter.add_(scale * noise)
    return model


def apart(model, seed=1, scale=0.02):
    """Moves the experts of a sparse model apart, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


@functools.cache
def photographs(size, count=8):
    """Crops of real photographs, normalised, (count, 3, size, size)."""
    images = [torch.tensor(image).permute(2, 0, 1) / 127.5 - 1 for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(0)
    crops = []
    for index in range(count):
        image = images[index % len(images)]
        top, left = (int(torch.randint(0, edge - 200, (), generator=generator)) for edge in image.shape[1:])
        crops.append(image[:, top : top + 200, left : left + 200])
    return F.interpolate(torch.stack(crops), size=(size, size), mode="bilinear", antialias=True)


def outputs(model: nn.Module, images):
    """Logits without gradients, also of Hugging Face's models; features of all blocks in a row."""
    with torch.no_grad():
        result = model(images)
    if isinstance(result, list):
        return torch.cat([features.flatten(1) for features in result], 1)
    return result.logits if hasattr(result, "logits") else result


def distance(a, b):
    """max |Δ| / std."""
    return float(((a - b).abs().max() / b.std()).detach())
