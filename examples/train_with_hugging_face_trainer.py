"""A sparse ViT trained by the Hugging Face Trainer: a loss of its own, a callback after steps, and back from disk.

Needs: pip install transformers accelerate. Run: python examples/train_with_hugging_face_trainer.py (seconds; digits).
"""

import sys
from importlib.util import find_spec

import torch
from torch.utils.data import Dataset

import ermoe
from ermoe.data.images import digits

if find_spec("transformers") is None or find_spec("accelerate") is None:
    print("skipped: this example needs transformers and accelerate (pip install transformers accelerate)")
    sys.exit()

from transformers import (
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from ermoe.train.hugging_face import ExpertUpkeep

LAMBDA = 5e-5


class Digits(Dataset):
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        return {"pixel_values": self.split.image[index], "labels": self.split.label[index]}


class Orthogonal(Trainer):
    """Adds the orthogonality loss, and leaves bases, s and ψ out of weight decay."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        if model.training:
            loss = loss + LAMBDA * ermoe.orthogonality_loss(model)
        return (loss, outputs) if return_outputs else loss

    def get_decay_parameter_names(self, model):
        exempt = ermoe.no_weight_decay(model)
        return [name for name in super().get_decay_parameter_names(model) if name not in exempt]


torch.set_num_threads(1)  # so small a model gains nothing from more
torch.manual_seed(0)
train, test = (Digits(split) for split in digits())
config = ViTConfig(
    hidden_size=48, num_hidden_layers=4, num_attention_heads=3, intermediate_size=192, image_size=8, patch_size=2,
    num_channels=1, num_labels=10,
)  # fmt: skip
model = ermoe.upcycle(ViTForImageClassification(config), num_experts=4, init="same")
arguments = TrainingArguments(
    output_dir="hf-run", num_train_epochs=8, per_device_train_batch_size=64, learning_rate=2e-3, weight_decay=0.05,
    warmup_steps=30, report_to="none", save_strategy="no", logging_steps=20, use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Orthogonal(model=model, args=arguments, train_dataset=train, eval_dataset=test, callbacks=[ExpertUpkeep()])
trainer.train()
predicted = trainer.predict(test)
accuracy = (predicted.predictions.argmax(1) == predicted.label_ids).mean()
print(f"accuracy {accuracy:.1%}")
assert accuracy > 0.5, "eight epochs are enough for more than half of the digits"

model.save_pretrained("hf-run/final")
again = AutoModelForImageClassification.from_pretrained("hf-run/final")
images = test[0]["pixel_values"].unsqueeze(0)
assert torch.allclose(again(images).logits, model.eval()(images).logits, atol=1e-5)
print(f"{type(again).__name__}: back from disk with the same answers")
