"""Saved models of a few kilobytes: an image classifier, one of transformers, a CLIP and an estimator of brain age."""

import timm
import torch

import ermoe
from ermoe.brain.ages import AgeBins
from ermoe.brain.data.scans import Preprocessing
from ermoe.brain.model import BrainAgeModel
from ermoe.models.vit3d import ViT3D

_TOWER = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


def classifier(folder):
    """Of the ten digits."""
    torch.manual_seed(0)
    dense = timm.create_model("vit_tiny_patch16_224", num_classes=10, **_TOWER)
    ermoe.save(ermoe.upcycle(dense, num_experts=4, rank=12, route_rank=4), folder)
    return folder


def hugging_face(folder):
    """As transformers writes it."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    dense = CLIPVisionModel(CLIPVisionConfig(**shape, image_size=8, patch_size=4))
    ermoe.upcycle(dense, num_experts=2, rank=12, route_rank=4).save_pretrained(folder)
    return folder


def clip(folder):
    from ermoe.retrieval.clip.model import create_clip
    from ermoe.retrieval.presets import TextShape

    text = TextShape(context_length=8, width=16, heads=2, layers=1)
    ermoe.save(create_clip("vit_tiny_patch16_224", text, embed_dim=8, image_args=_TOWER), folder)
    return folder


def brain_age(folder):
    torch.manual_seed(0)
    head = AgeBins(40, 48)
    network = ViT3D((16, 16, 16), patch_size=8, embed_dim=12, depth=1, num_heads=2, num_classes=head.num_outputs)
    model = BrainAgeModel(
        {"fold-0": network}, head, "t1", Preprocessing(8.0, (16, 16, 16)), 8, {"0123": ("test",)}, (40.0, 48.0),
        ("stripped",), None, {"fold-0": None}, 1.0, {},
    )  # fmt: skip
    model.save(folder)
    return folder
