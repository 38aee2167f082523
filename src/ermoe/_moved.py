"""Names that modules, and things in them, had before version 0.1: they still import, with a warning that says more."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# Where a module is, and the names it had, all within ermoe; modules below an old name are below the new one.
_MOVED = {
    "analysis.plots": "analysis.basis_plots analysis.curve_plots",
    "analysis.report": "analysis.gallery",
    "brain": "models.brain tasks.brain_age",
    "brain.ages": "brain.age_head brain.calibration",
    "brain.batches": "brain.data.augment brain.variants",
    "brain.commands": "cli.brain cli.brain_data",
    "brain.data": "data.brain",
    "brain.data.bids": "brain.data.codes brain.data.derivatives",
    "brain.data.cohort": "brain.data.bids_cohort brain.data.flat_cohort",
    "brain.data.nifti": "brain.data.affines brain.data.alignment brain.data.grid",
    "brain.data.phantom.anatomy": "brain.data.phantom.atlas brain.data.phantom.fields brain.data.phantom.picture",
    "brain.data.phantom.dataset": "brain.data.phantom.tables",
    "brain.data.preprocess": "brain.data.intensity brain.data.mask brain.data.skull_strip brain.data.tissue "
    "brain.data.weighting",
    "brain.data.quality": "brain.data.confounds brain.data.fingerprint",
    "brain.data.scans": "brain.data.identity brain.data.options brain.data.problems",
    "brain.data.tables": "brain.data.demographics brain.data.table",
    "brain.evaluation": "brain.simple",
    "brain.inputs": "brain.contrast",
    "brain.metrics": "brain.retest",
    "brain.model": "brain.predict",
    "brain.reporting.derivative": "brain.reporting.card tasks.brain_age.card tasks.brain_age.derivative",
    "brain.reporting.page": "tasks.brain_age.report",
    "brain.reporting.pictures": "brain.reporting.mosaic tasks.brain_age.mosaic tasks.brain_age.pictures",
    "brain.reporting.routing_sections": "brain.reporting.occlusion tasks.brain_age.occlusion "
    "tasks.brain_age.routing_sections",
    "brain.rivals.sfcn": "models.baselines.sfcn",
    "brain.rivals.swin3d": "models.baselines.swin3d",
    "cli.main": "cli.image",
    "data.augment": "data.rand_augment",
    "data.images": "data.catalogue data.digits",
    "data.order": "data.randomness",
    "explorer.commands": "cli.inspect",
    "explorer.inspect": "tasks.image.inspect",
    "explorer.inspection": "analysis.inspection analysis.inspection_page",
    "explorer.patches": "analysis.patch_viewer analysis.patches",
    "files": "data.reading",
    "images": "tasks.image",
    "images.check": "data.check",
    "images.predicting": "images.predict",
    "images.rivals": "models.baselines",
    "images.run": "tasks.image.classification",
    "models.backbones": "models.sparse_block",
    "models.calibrate": "models.equal_load",
    "models.eigen_init": "models.moments",
    "models.families.timm_vit": "models.families.timm_ffn",
    "models.io": "models.weights.checkpoints models.weights.rebuild models.weights.state",
    "models.merge": "models.dense",
    "models.passes": "models.batches models.static_path",
    "models.presets": "models.costs",
    "models.upcycle": "models.sparsity",
    "models.vit3d": "models.families.volume",
    "nn.ffn": "models.ffn",
    "nn.tracing": "nn.recompute",
    "retrieval": "tasks.retrieval",
    "retrieval.captions": "data.captions",
    "retrieval.captions.files": "data.captions.coco data.captions.tables data.captions.text_files",
    "retrieval.captions.schema": "data.captions.ids",
    "retrieval.clip": "models.clip",
    "retrieval.clip.adapter": "models.families.clip",
    "retrieval.clip.towers": "models.clip.tokens",
    "retrieval.commands": "cli.retrieve",
    "retrieval.contrastive": "models.baselines.fix_clip tasks.retrieval.losses tasks.retrieval.objectives",
    "retrieval.encode": "tasks.retrieval.classify",
    "retrieval.figures": "tasks.retrieval.ranking",
    "retrieval.report": "tasks.retrieval.plots",
    "retrieval.rivals.clip_moe": "models.baselines.clip_moe",
    "retrieval.rivals.long_clip": "models.baselines.long_clip",
    "retrieval.shapes": "data.shapes",
    "studies.bench": "bench",
    "studies.bench.layer": "bench.routing bench.scaling",
    "studies.bench.measure": "bench.clock bench.memory",
    "studies.bench_command": "cli.bench",
    "studies.comparison": "bench.study bench.study_steps",
    "studies.demo": "cli.demo tasks.demo tasks.demo_report",
    "studies.paper": "paper",
    "studies.paper.accuracy": "paper.ablation paper.expert_choice paper.few_shot paper.imagenet",
    "studies.paper.brains": "paper.brain_age paper.brain_scatter paper.calibration",
    "studies.paper.captions": "paper.coco paper.flickr paper.text_tuning",
    "studies.paper.costs": "paper.efficiency paper.expert_scaling paper.routing_cost",
    "studies.paper.sweeps": "paper.orthogonality paper.threshold paper.top_k",
    "studies.paper.tissues": "paper.region_routing",
    "studies.paper.usage": "paper.balance paper.train_heatmaps",
    "studies.paper_command": "cli.paper",
    "studies.record": "bench.record",
    "train.compute": "train.distributed",
    "train.loader": "data.ahead data.loader",
    "train.loop": "train.task",
    "train.run_folder": "train.board train.progress",
    "train.settings": "models.scratch",
    "train.trainer": "train.average train.optim",
}
_HOMES = {f"ermoe.{old}": f"ermoe.{home}" for home, names in _MOVED.items() for old in names.split()}

# What did not go where the rest of its module is: by that module's old name, where it is and what it is called there.
_APART = {
    "ermoe.bench.record": {name: ("ermoe.studies.bench.result", name) for name in ("Bar", "Result", "save", "show")},
    "ermoe.brain.age_head": {"age_head": ("ermoe.brain.ages", "stored_head")},
    "ermoe.models.scratch": {"restart_ffns": ("ermoe.models.upcycle", "restart_ffns")},
}

_ALSO_FUNCTIONS = ("ermoe.images.predict",)
"""Old names of modules that are names of functions now."""

_EMPTIED = "ermoe.tasks"
"""A package of which nothing is left but the names of its former parts."""


def home_of(name: str) -> str | None:
    """Where a module that moved is; None if it did not move.

    >>> home_of("ermoe.data.brain.cohort"), home_of("ermoe.data.images")
    ('ermoe.brain.data.cohort', None)
    """
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        if (home := _HOMES.get(".".join(parts[:length]))) is not None:
            return ".".join([home, *parts[length:]])
    return None


class _CallableModule(ModuleType):
    """A module whose name a function of its package has now: it has the names of its new home, and is that function."""

    def __init__(self, name: str, home: ModuleType) -> None:
        super().__init__(name, home.__doc__)
        self.__dict__.update({own: value for own, value in vars(home).items() if not own.startswith("__")})

    def __call__(self, *given: Any, **options: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*given, **options)


class _Forwarding(MetaPathFinder, Loader):
    """Gives the module of the new name for the old one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _EMPTIED:
            return ModuleSpec(fullname, self, is_package=True)
        return None if home_of(fullname) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        home = home_of(spec.name)
        if home is None:
            return None
        apart = _APART.get(spec.name, {})
        elsewhere = "".join(f"; {name} is {place}.{now}" for name, (place, now) in apart.items())
        warnings.warn(f"{spec.name} is {home} now: import it from there{elsewhere}", DeprecationWarning, stacklevel=2)
        module = import_module(home)
        if spec.name in _ALSO_FUNCTIONS:
            return _CallableModule(spec.name, module)
        if apart:
            both = ModuleType(spec.name, module.__doc__)
            both.__dict__.update({name: value for name, value in vars(module).items() if not name.startswith("__")})
            both.__dict__.update({name: getattr(import_module(place), now) for name, (place, now) in apart.items()})
            return both
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed twice; the import system has put the spec of the old name into the module."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def renamed(**now: str) -> Callable[[Function], Function]:
    """Lets a function take arguments by names they had before, with a warning: ``@renamed(old="new")``."""

    def wrap(function: Function) -> Function:
        @wraps(function)
        def called(*given: Any, **options: Any) -> Any:
            for old in now.keys() & options.keys():
                said = f"{function.__name__}({old}=…) is {function.__name__}({now[old]}=…) now"
                warnings.warn(said, DeprecationWarning, stacklevel=2)
                options[now[old]] = options.pop(old)
            return function(*given, **options)

        return called  # type: ignore[return-value]

    return wrap


def forward_old_names() -> None:
    """From now on old names import."""
    if not any(isinstance(finder, _Forwarding) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Forwarding())
