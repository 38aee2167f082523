"""Eigen-reparameterized mixtures of experts: sparse transformers that route by their experts' own bases.

Names are resolved on first use, so that ``ermoe --help`` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ermoe._auto_classes import tell_auto_classes
from ermoe._lazy import offer
from ermoe._moved import forward_old_names
from ermoe._version import __version__ as __version__

if TYPE_CHECKING:
    from ermoe.analysis.recorder import record_routing
    from ermoe.data.images import open_images
    from ermoe.explorer.explore import explore
    from ermoe.models.calibrate import calibrate
    from ermoe.models.count import count
    from ermoe.models.export import export
    from ermoe.models.freeze import freeze, lora_targets, unfreeze
    from ermoe.models.hub import push
    from ermoe.models.io import load, save
    from ermoe.models.merge import merge, to_dense
    from ermoe.models.presets import preset
    from ermoe.models.slim import slim
    from ermoe.models.upcycle import upcycle
    from ermoe.models.vit3d import ViT3D
    from ermoe.models.weights.foreign import load_weights
    from ermoe.nn import EigenMoE, MoE, Routing, no_weight_decay, orthogonality_loss, retract, update_balance
    from ermoe.nn.parallel import distribute
    from ermoe.nn.registry import build_layer
    from ermoe.nn.rivals.losses import auxiliary_loss
    from ermoe.retrieval.captions.catalogue import open_captions
    from ermoe.train.distillation import distill

forward_old_names()
tell_auto_classes()

_HOMES = {
    "ermoe.analysis.recorder": ("record_routing",),
    "ermoe.data.images": ("open_images",),
    "ermoe.explorer.explore": ("explore",),
    "ermoe.models.calibrate": ("calibrate",),
    "ermoe.models.count": ("count",),
    "ermoe.models.export": ("export",),
    "ermoe.models.freeze": ("freeze", "lora_targets", "unfreeze"),
    "ermoe.models.hub": ("push",),
    "ermoe.models.io": ("load", "save"),
    "ermoe.models.merge": ("merge", "to_dense"),
    "ermoe.models.presets": ("preset",),
    "ermoe.models.slim": ("slim",),
    "ermoe.models.upcycle": ("upcycle",),
    "ermoe.models.vit3d": ("ViT3D",),
    "ermoe.models.weights.foreign": ("load_weights",),
    "ermoe.nn": ("EigenMoE", "MoE", "Routing", "no_weight_decay", "orthogonality_loss", "retract", "update_balance"),
    "ermoe.nn.parallel": ("distribute",),
    "ermoe.nn.registry": ("build_layer",),
    "ermoe.nn.rivals.losses": ("auxiliary_loss",),
    "ermoe.retrieval.captions.catalogue": ("open_captions",),
    "ermoe.train.distillation": ("distill",),
}

__all__ = [
    "EigenMoE", "MoE", "Routing", "ViT3D", "auxiliary_loss", "build_layer", "calibrate", "count", "distill",
    "distribute", "explore", "export", "freeze", "load", "load_weights", "lora_targets", "merge", "no_weight_decay",
    "open_captions", "open_images", "orthogonality_loss", "preset", "push", "record_routing", "retract", "save",
    "slim", "to_dense", "unfreeze", "upcycle", "update_balance",
]  # fmt: skip

__getattr__, __dir__ = offer("ermoe", _HOMES, parts=("brain", "images", "retrieval"))
