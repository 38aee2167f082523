"""A run so small that it can be repeated, killed and spread over processes within seconds."""

import torch

from ermoe.data.images import ImagesInMemory
from ermoe.images.presets import ImageRecipe
from ermoe.images.run import Classification, LabelledImages
from ermoe.train.compute import Compute
from ermoe.train.loop import fit, means_among
from ermoe.train.settings import NO_AUGMENTATION, Augmentation, Training

ARGS = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
SPARSITY = {"num_experts": 4, "rank": 12, "route_rank": 4}
TRAINING = {
    "epochs": 2,
    "batch_size": 16,
    "base_lr": 0.05,
    "warmup_epochs": 0.2,
    "ema": 0.9,
    "log_every": 1,
    "orthogonality": 1e-2,
    "orthogonality_every": 2,
    "basis_lr": 0.5,
    "retract_every": 6,
}


def images(split, num_images=200, seed=0):
    """Random pixels, brighter for some classes, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 4, (num_images,), generator=generator)
    pixels = torch.randint(0, 128, (num_images, 3, 8, 8), generator=generator) + 40 * label.view(-1, 1, 1, 1)
    return ImagesInMemory(
        pixels.clamp(max=255).to(torch.uint8), summary=f"made for tests, {split}", split=split, classes=list("abcd"),
        label_N=label,
    )  # fmt: skip


def recipe(sparsity=SPARSITY, augmentation=NO_AUGMENTATION, model_args=(), validation=0.0, **training):
    settings = Training(**TRAINING | training)
    args = ARGS | dict(model_args)
    return ImageRecipe(
        "vit_tiny_patch16_224", sparsity, settings, augmentation, init="random", model_args=args, validation=validation
    )


AUGMENTED = Augmentation(rand_ops=1, erase=0.5, mixup=0.8, cutmix=1.0)


class StoppedError(Exception):
    """What stops a run in the middle of a test."""


class Stopping(Classification):
    """Stops, or does something else, before a step of an epoch."""

    def __init__(self, *args, before=None, **options):
        super().__init__(*args, **options)
        self.before = before

    def batches(self, epoch, first_step):
        for step, parts in enumerate(super().batches(epoch, first_step), first_step):
            if self.before is not None:
                self.before(epoch, step)
            yield parts


def labelled(train=None, test=None):
    return LabelledImages("made", train or images("train"), test or images("test", 40, seed=1))


def run(folder, chosen, *, group=None, before=None, task_only=False, data=None, **options):
    compute = Compute() if group is None else Compute(group)
    task = Stopping(chosen.build(4), data or labelled(), chosen, compute, before=before)
    if task_only:
        return task
    means, options = means_among({"group": compute.group, **options})
    fit(task, chosen.training, folder, config={"test": True}, compute=means, **options)
    return task
