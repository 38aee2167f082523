"""What a user of Hugging Face does with a sparse ViT: train it, lose the process, resume, share it. FOLDER REPO

Started by test_hugging_face.py. Everything is imported once; each life of the run, and whoever loads the model, is a
fork, so that a life costs no start-up.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import (
    AutoModelForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import ermoe
from ermoe.data.images import digits
from ermoe.train.hugging_face import ExpertUpkeep

STEPS_PER_EPOCH, EPOCHS, SAVED_EVERY = 6, 3, 3


class Digits(Dataset):
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 16 * STEPS_PER_EPOCH

    def __getitem__(self, index):
        return {"pixel_values": self.split.image[index], "labels": self.split.label[index]}


class Killer(TrainerCallback):
    """Ends the process after a step, before the Trainer can do anything about it."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(do, *args):
    """Runs a function in a fork; returns what ended it: 0, or the number of a signal."""
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        do(*args)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def train(folder, killed_at=None):
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=8, patch_size=2,
        num_channels=1, num_labels=10, hidden_dropout_prob=0.1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = ermoe.upcycle(ViTForImageClassification(config), num_experts=4, init="same", generator=generator)
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=16, learning_rate=2e-3,
        save_strategy="steps", save_steps=SAVED_EVERY, report_to="none", use_cpu=True, disable_tqdm=True, seed=1,
    )  # fmt: skip
    callbacks = [ExpertUpkeep()] if killed_at is None else [ExpertUpkeep(), Killer(killed_at)]
    trainer = Trainer(model=model, args=arguments, train_dataset=Digits(digits()[0]), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    trainer.save_model(str(folder / "final"))


def compare(folder, repo):
    """The model that a run ended with is the one in its last checkpoint and on the hub, whoever loads it."""
    images, logits = torch.load(folder / "answers.pt")
    for loaded in (
        AutoModelForImageClassification.from_pretrained(folder / "disturbed" / "final"),
        AutoModelForImageClassification.from_pretrained(repo),
        ermoe.load(folder / "disturbed" / f"checkpoint-{EPOCHS * STEPS_PER_EPOCH}"),
        ermoe.load(repo),
    ):
        assert type(loaded).__name__ == "SparseViTForImageClassification"
        torch.testing.assert_close(loaded.eval()(images).logits, logits)


def main(folder, repo):
    assert in_a_process(train, folder / "undisturbed") == 0
    for step in (
        5,
        2 * STEPS_PER_EPOCH + 1,
    ):  # resumed inside an epoch, and at an end where bases were retracted
        assert in_a_process(train, folder / "disturbed", step) == signal.SIGKILL
    assert in_a_process(train, folder / "disturbed") == 0
    undisturbed, disturbed = (
        load_file(folder / way / "final" / "model.safetensors") for way in ("undisturbed", "disturbed")
    )
    assert undisturbed.keys() == disturbed.keys()
    unequal = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, disturbed[name])]
    assert not unequal, unequal
    assert any(tensor.any() for name, tensor in disturbed.items() if "offset_E" in name)
    model = AutoModelForImageClassification.from_pretrained(folder / "undisturbed" / "final")
    images = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        torch.save((images, model(images).logits), folder / "answers.pt")
    ermoe.push(model, repo, datasets=["digits"])
    assert in_a_process(compare, folder, repo) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
