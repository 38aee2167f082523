"""Sparse models of Hugging Face's transformers: what ``save_pretrained`` writes, ``from_pretrained`` builds again.

`ermoe.upcycle` gives such a model a subclass of its class, ``SparseViTForImageClassification``, and a subclass of its
configuration, of model type "ermoe_vit", whose entry ``ermoe`` says how it was made sparse. Both are registered with
transformers' Auto classes. A class of transformers itself would take the rest of the weights and draw the missing
networks anew; from the configuration it reads that it must not.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ermoe._auto_classes import DENSE_TYPES, NAME, NOTICE, PREFIX
from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.merge import merge
from ermoe.models.upcycle import Sparsity, upcycle
from ermoe.nn import moe_layers

_SENTENCE = (
    "this model is sparse: import ermoe, and load it with ermoe.load or an Auto class, such as "
    "AutoModelForImageClassification, not with the class of the dense model"
)


class SparseConfig:
    """What is added to a configuration of transformers: ``ermoe``, with "sparsity", "merged" and, of models that were
    built with any, "options" of their constructor, as `ermoe.save` has."""

    dense_class: ClassVar[Any]

    def __post_init__(self, **options: Any) -> None:
        for name in (NOTICE, "ermoe_version", "save"):  # what only a file has to say
            options.pop(name, None)
        for part in (vars(self).get("vision_config"), vars(self).get("text_config")):
            if isinstance(part, dict):
                part.pop(NOTICE, None)
        super().__post_init__(**options)  # type: ignore[misc]

    def to_dict(self) -> Json:
        """The configuration as plain data, with a sentence for classes that would build a dense model from it."""
        plain: Json = super().to_dict()  # type: ignore[misc]
        for part in (plain, plain.get("vision_config")):  # the tower that sees can be loaded alone
            if part is not None:
                part[NOTICE] = _SENTENCE
        return plain


class SparseModel:
    """What is added to a model of transformers: it is sparse as soon as it is built."""

    dense_class: ClassVar[Any]

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        made = getattr(config, "ermoe", None)
        built = made.get("options", {}) if isinstance(made, dict) and not inputs else {}
        super().__init__(config, *inputs, **{**built, **options})  # type: ignore[call-arg]
        if not isinstance(made, dict) or "sparsity" not in made:
            raise UserError(
                f"this configuration does not say how a {type(self).__name__} is sparse: build the dense model, and "
                "make it sparse with ermoe.upcycle"
            )
        model: Any = self
        upcycle(model, init="random", inplace=True, is_new=True, **made["sparsity"])
        if made.get("merged"):
            merge(model, inplace=True)
        config.ermoe = model.config.ermoe
        _give(model, config, type(model), model)  # the one it was given: the configuration of a whole may hold it
        model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "offset_E"}

    def save_pretrained(
        self, save_directory: Any, *inputs: Any, save_original_format: bool = False, **options: Any
    ) -> None:
        """As in transformers, but weights keep the names they have in the model, and whom the umask lets may read them.

        Names of earlier versions, which transformers prefers, its own Trainer does not find when a run resumes; and
        safetensors leaves files to their owner alone.
        """
        options["save_original_format"] = save_original_format
        super().save_pretrained(save_directory, *inputs, **options)  # type: ignore[misc]
        config = Path(save_directory, "config.json")
        for weights in Path(save_directory).glob("model*.safetensors") if config.is_file() else ():
            weights.chmod(config.stat().st_mode)

    @classmethod
    def from_pretrained(cls, *inputs: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """As in transformers, but weights of experts or routers that are missing are an error."""
        found = super().from_pretrained(*inputs, output_loading_info=True, **options)  # type: ignore[misc]
        model, info = found
        layers = tuple(f"{name}." for name in moe_layers(model))
        if missing := sorted(name for name in info["missing_keys"] if name.startswith(layers)):
            raise UserError(f"{inputs[0]} lacks weights of experts, for example {missing[0]}: save the model again")
        return found if output_loading_info else model


@cache
def sparse_config(dense_type: str) -> Any:
    """The class of configurations of sparse models whose dense ones have the type ``dense_type``; now registered.

    >>> config = sparse_config("vit")
    >>> config.__name__, config.model_type
    ('SparseViTConfig', 'ermoe_vit')
    """
    dense: Any = CONFIG_MAPPING[dense_type]
    sparse = _config_like(dense)
    AutoConfig.register(sparse.model_type, sparse, exist_ok=True)
    # Every Auto class that knows the dense model knows the sparse one, and images are prepared alike.
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        if mapping is not None and dense in mapping:
            models = mapping[dense]
            sparse_models = tuple(map(sparse_class, models)) if isinstance(models, tuple) else sparse_class(models)
            mapping.register(sparse, sparse_models, exist_ok=True)
    if dense in IMAGE_PROCESSOR_MAPPING:
        IMAGE_PROCESSOR_MAPPING.register(sparse, IMAGE_PROCESSOR_MAPPING[dense], exist_ok=True)
    return sparse


@cache
def _config_like(dense: Any) -> Any:
    names = {"model_type": PREFIX + dense.model_type, "dense_class": dense, "__module__": __name__}
    return type(NAME + dense.__name__, (SparseConfig, dense), names)


@cache
def sparse_class(dense: Any) -> Any:
    """The class of sparse models whose dense ones are of the class ``dense``, a subclass of it.

    >>> from transformers import ViTModel
    >>> sparse_class(ViTModel).__name__, issubclass(sparse_class(ViTModel), ViTModel)
    ('SparseViTModel', True)
    """
    names = {"config_class": _config_like(dense.config_class), "dense_class": dense, "__module__": __name__}
    return type(NAME + dense.__name__, (SparseModel, dense), names)


def dense_class(model: Any) -> Any:
    """The class of transformers that a model has, or had before it became sparse."""
    return model.dense_class if isinstance(model, SparseModel) else type(model)


def options_of(model: Any) -> dict[str, bool]:
    """What the constructor of a model was told that its configuration does not say, where that is not the usual.

    >>> from transformers import ViTConfig, ViTModel
    >>> options_of(ViTModel(ViTConfig(num_hidden_layers=1), add_pooling_layer=False))
    {'add_pooling_layer': False}
    """
    found = {
        "add_pooling_layer": getattr(model, "pooler", None) is not None,
        "use_mask_token": getattr(getattr(model, "embeddings", None), "mask_token", None) is not None,
    }
    usual = inspect.signature(dense_class(model)).parameters
    return {name: value for name, value in found.items() if name in usual and value != usual[name].default}


def dense_config(config: Any) -> Any:
    """The configuration of the dense model: a copy of ``config`` without a word on experts."""
    config = copy.copy(config)
    if isinstance(config, SparseConfig):
        config.__class__ = config.dense_class
        del vars(config)["ermoe"]
    return config


def config_json(model: Any) -> Json:
    """What ``save_pretrained`` writes into config.json, with eager attention where the model has that."""
    is_eager = model.config._attn_implementation == "eager"
    eager = {"attn_implementation": "eager"} if is_eager else {}
    return {**model.config.to_diff_dict(), "architectures": [type(model).__name__], **eager}


def mark(model: Any, sparsity: Sparsity | None, whole: nn.Module) -> None:
    """Gives a model the class and the configuration of a sparse one, or renews what the latter says; None undoes it.

    A ``whole`` around it, such as a LLaVA, then builds it sparse: its own configuration holds that of the model.
    """
    dense, config = dense_class(model), dense_config(model.config)
    if sparsity is None:
        _give(model, config, dense, whole)
        return
    if config.model_type in DENSE_TYPES:
        sparse_config(config.model_type)
    config_class: Any = type(config)
    config.__class__ = _config_like(config_class)
    told = {"options": options} if (options := options_of(model)) else {}
    config.ermoe = {"sparsity": sparsity.as_options(), "merged": sparsity.merged, **told}
    _give(model, config, sparse_class(dense), whole)


def _give(model: Any, config: PreTrainedConfig, kind: Any, whole: nn.Module) -> None:
    """Another class, and another configuration wherever the model's is held: other models may have the old."""
    old = model.config
    holders = [module for module in whole.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)]
    changed = {id(held): _exchanged(held, old, config) for held in (module.config for module in holders)}
    for module in holders:
        if (new := changed[id(module.config)]) is not module.config:
            module.config = new
    model.__class__ = kind
    # Which outputs it can record (output_hidden_states=True): transformers notes that where a model is built.
    _CAN_RECORD_REGISTRY[str(kind)] = kind._can_record_outputs


def _exchanged(config: Any, old: Any, new: Any) -> Any:
    """A configuration with ``new`` in the place of ``old``; itself, if it does not hold that."""
    if config is old:
        return new
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    others = {name: other for name, part in parts.items() if (other := _exchanged(part, old, new)) is not part}
    config = copy.copy(config) if others else config
    vars(config).update(others)
    return config


def is_built_by(whole: Any, model: Any) -> bool:
    """Whether a model of transformers builds another, a part of it, from its own configuration."""
    config = getattr(whole, "config", None)
    return isinstance(config, PreTrainedConfig) and _exchanged(config, model.config, None) is not config


def __getattr__(name: str) -> Any:
    """Classes of sparse models by name, which is how a pickle, or a person, finds them."""
    import transformers

    dense: Any = getattr(transformers, name.removeprefix(NAME), None) if name.startswith(NAME) else None
    base = next((base for base in (PreTrainedModel, PreTrainedConfig) if base in getattr(dense, "__mro__", ())), None)
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return sparse_class(dense) if base is PreTrainedModel else _config_like(dense)
