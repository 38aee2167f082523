"""What `ermoe.upcycle` refuses because outputs would change without a word: models, and the table about them.

``python tests/support/refusals.py docs/reference/backbones.md`` writes the table anew.
"""

import sys
from pathlib import Path

import timm
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

START, END = "<!-- refusals -->", "<!-- end of refusals -->"


def _vit():
    return timm.create_model("test_vit", img_size=64, num_classes=10)


def _with(change, part="mlp"):
    model = _vit()
    change(model.blocks[3].get_submodule(part))
    return model


def _nothing(*args):
    pass


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Noise(nn.Dropout):
    def forward(self, x):
        return x + self.p * torch.randn_like(x)


class Adapted(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear, self.added = linear, nn.Linear(64, 192)

    def forward(self, x):
        return self.linear(x) + self.added(x)


class LoRA(Adapted):
    base_layer = None  # as the layers of peft have


Doubled.__module__ = Adapted.__module__ = Noise.__module__ = "mine"  # whoever runs this file
LoRA.__module__ = "peft.tuners.lora.layer"  # the real one: tests/training/models/test_lora.py


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = _vit(), _vit()


def _compiled_forward():
    model = _vit()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _tied():
    model = _vit()
    model.blocks[5].mlp = model.blocks[3].mlp
    return model


def _compiled_part():
    model = nn.ModuleDict({"tower": _vit()})
    model["tower"] = torch.compile(_vit(), backend="eager")
    return model


# What a user has -> a model that has it, and the options of `upcycle`.
REFUSALS = {
    "a hook on the FFN": (lambda: _with(lambda mlp: mlp.register_forward_hook(_nothing)), {}),
    "a hook on one of its layers": (lambda: _with(lambda mlp: mlp.fc1.register_forward_pre_hook(_nothing)), {}),
    "an FFN whose `forward` was replaced": (lambda: _with(lambda mlp: setattr(mlp, "forward", _nothing)), {}),
    "a block whose `forward` was replaced": (lambda: _with(lambda block: setattr(block, "forward", _nothing), ""), {}),
    "a model, or another part of it, whose `forward` was replaced": (_compiled_forward, {}),
    "a hook on attention": (lambda: _with(lambda attn: attn.register_forward_hook(_nothing), "attn"), {}),
    "attention whose `forward` was replaced": (lambda: _with(lambda attn: setattr(attn, "forward", print), "attn"), {}),
    "a subclass of `nn.Linear`": (lambda: _with(lambda mlp: setattr(mlp.fc1, "__class__", Doubled)), {}),
    "dropout or a norm in the FFN that does something else": (
        lambda: _with(lambda mlp: setattr(mlp.drop1, "__class__", Noise)),
        {},
    ),
    "a LoRA that is not merged, wherever it is": (lambda: _with(lambda mlp: setattr(mlp, "fc1", LoRA(mlp.fc1))), {}),
    "an adapter of your own": (lambda: _with(lambda mlp: setattr(mlp, "fc1", Adapted(mlp.fc1))), {}),
    "a hook on the gradient of one of its weights": (
        lambda: _with(lambda mlp: mlp.fc1.weight.register_hook(_nothing)),
        {},
    ),
    "a parametrization": (lambda: _with(lambda mlp: parametrizations.weight_norm(mlp.fc1)), {}),
    "pruned weights, old weight norms": (lambda: _with(lambda mlp: prune.l1_unstructured(mlp.fc1, "weight", 0.3)), {}),
    "integer weights": (lambda: _with(lambda mlp: setattr(mlp.fc1, "weight", _quantised(mlp.fc1))), {}),
    "an FFN that two blocks share": (_tied, {}),
    "parallel or post-norm blocks": (lambda: timm.create_model("vit_base_patch16_rpn_224", embed_dim=48, depth=4), {}),
    "differential attention": (lambda: timm.create_model("test_vit", attn_layer="diff"), {}),
    "several backbones in a module": (TwoTowers, {}),
    "a compiled part of a module": (_compiled_part, {}),
    "a compiled model, in place": (lambda: torch.compile(_vit(), backend="eager"), {"inplace": True}),
    "a part of a model": (lambda: _vit().blocks[0], {}),
    "no backbone": (lambda: nn.Linear(2, 2), {}),
}


def _quantised(linear):
    return nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)


def sentence(name):
    """What `ermoe.upcycle` says."""
    import ermoe

    make, options = REFUSALS[name]
    try:
        ermoe.upcycle(make(), **options)
    except ermoe.errors.UserError as problem:
        return str(problem)
    return "nothing"


def table(sentences):
    """The table of docs/reference/backbones.md."""
    rows = [f"| {name} | {said.replace('|', ' ')} |" for name, said in sentences.items()]
    return "\n".join([START, "", "| a model with | is told |", "| :-- | :-- |", *rows, "", END])


if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    page.write_text(before + table({name: sentence(name) for name in REFUSALS}) + after, encoding="utf-8")
