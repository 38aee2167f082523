"""Modules under the names they had before version 0.1: they still import, with a warning that names their home."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Old prefix -> new one; the longest that fits counts.
_HOMES = {
    **{
        f"ermoe.{part}": f"ermoe.{home}"
        for home, parts in {
            "cli.main": ("cli.image",),
            "data.augment": ("data.rand_augment",),
            "data.images": ("data.catalogue", "data.digits"),
            "data.order": ("data.randomness",),
            "files": ("data.reading",),
            "images.run": ("tasks.image.classification",),
            "models.backbones": ("models.ffn", "models.sparse_block"),
            "models.calibrate": ("models.equal_load",),
            "models.eigen_init": ("models.moments",),
            "models.families.timm_vit": ("models.families.timm_ffn",),
            "models.io": ("models.weights.checkpoints", "models.weights.rebuild", "models.weights.state"),
            "models.merge": ("models.dense",),
            "models.passes": ("models.batches", "models.static_path"),
            "models.presets": ("models.costs",),
            "models.upcycle": ("models.sparsity",),
            "models.vit3d": ("models.families.volume",),
            "train.compute": ("train.distributed",),
            "train.loader": ("data.ahead", "data.loader"),
            "train.loop": ("train.task",),
            "train.run_folder": ("train.board", "train.progress"),
            "train.settings": ("models.scratch",),
            "train.trainer": ("train.average", "train.optim"),
        }.items()
        for part in parts
    },
    **{
        f"ermoe.brain.{part}": f"ermoe.brain.{home}"
        for home, parts in {
            "ages": ("age_head", "calibration"),
            "batches": ("data.augment", "variants"),
            "data.bids": ("data.codes", "data.derivatives"),
            "data.cohort": ("data.bids_cohort", "data.flat_cohort"),
            "data.nifti": ("data.affines", "data.alignment", "data.grid"),
            "data.phantom.anatomy": ("data.phantom.atlas", "data.phantom.fields", "data.phantom.picture"),
            "data.phantom.dataset": ("data.phantom.tables",),
            "data.preprocess": ("data.intensity", "data.mask", "data.skull_strip", "data.tissue", "data.weighting"),
            "data.quality": ("data.confounds", "data.fingerprint"),
            "data.scans": ("data.identity", "data.options", "data.problems"),
            "data.tables": ("data.demographics", "data.table"),
            "evaluation": ("simple",),
            "inputs": ("contrast",),
            "metrics": ("retest",),
            "model": ("predict",),
            "reporting.derivative": ("reporting.card",),
            "reporting.pictures": ("reporting.mosaic",),
            "reporting.routing_sections": ("reporting.occlusion",),
        }.items()
        for part in parts
    },
    **{
        f"ermoe.{old}.{part}": f"ermoe.{home}"
        for (old, home), parts in {
            ("analysis", "analysis.report"): ("gallery",),
            ("analysis", "analysis.plots"): ("basis_plots", "curve_plots"),
            ("analysis", "explore.inspection"): ("inspection", "inspection_page"),
            ("analysis", "explore.patches"): ("patch_viewer", "patches"),
            ("bench", "studies.bench.layer"): ("routing", "scaling"),
            ("bench", "studies.bench.measure"): ("clock", "memory"),
            ("bench", "studies.comparison"): ("study", "study_steps"),
            ("bench", "studies.record"): ("record",),
            ("data.captions", "retrieval.captions.files"): ("coco", "tables", "text_files"),
            ("data.captions", "retrieval.captions.schema"): ("ids",),
            ("models", "retrieval.clip.adapter"): ("families.clip",),
            ("models", "retrieval.clip.towers"): ("clip.tokens",),
            ("models", "retrieval.contrastive"): ("baselines.fix_clip",),
            ("paper", "studies.paper.accuracy"): ("ablation", "expert_choice", "few_shot", "imagenet"),
            ("paper", "studies.paper.brains"): ("brain_age", "brain_scatter", "calibration"),
            ("paper", "studies.paper.captions"): ("coco", "flickr", "text_tuning"),
            ("paper", "studies.paper.costs"): ("efficiency", "expert_scaling", "routing_cost"),
            ("paper", "studies.paper.sweeps"): ("orthogonality", "threshold", "top_k"),
            ("paper", "studies.paper.tissues"): ("region_routing",),
            ("paper", "studies.paper.usage"): ("balance", "train_heatmaps"),
            ("tasks.retrieval", "retrieval.contrastive"): ("losses", "objectives"),
            ("tasks.retrieval", "retrieval.encode"): ("classify",),
            ("tasks.retrieval", "retrieval.figures"): ("ranking",),
            ("tasks.retrieval", "retrieval.report"): ("plots",),
        }.items()
        for part in parts
    },
    "ermoe.bench": "ermoe.studies.bench",
    "ermoe.cli.bench": "ermoe.studies.bench_command",
    "ermoe.cli.brain": "ermoe.brain.commands",
    "ermoe.cli.brain_data": "ermoe.brain.commands",
    "ermoe.cli.demo": "ermoe.studies.demo",
    "ermoe.cli.inspect": "ermoe.explore.commands",
    "ermoe.cli.paper": "ermoe.studies.paper_command",
    "ermoe.cli.retrieve": "ermoe.retrieval.commands",
    "ermoe.data.brain": "ermoe.brain.data",
    "ermoe.data.captions": "ermoe.retrieval.captions",
    "ermoe.data.check": "ermoe.images.check",
    "ermoe.data.shapes": "ermoe.retrieval.shapes",
    "ermoe.models.baselines": "ermoe.images.rivals",
    "ermoe.models.baselines.clip_moe": "ermoe.retrieval.rivals.clip_moe",
    "ermoe.models.baselines.long_clip": "ermoe.retrieval.rivals.long_clip",
    "ermoe.models.baselines.sfcn": "ermoe.brain.rivals.sfcn",
    "ermoe.models.baselines.swin3d": "ermoe.brain.rivals.swin3d",
    "ermoe.models.brain": "ermoe.brain",
    "ermoe.models.clip": "ermoe.retrieval.clip",
    "ermoe.paper": "ermoe.studies.paper",
    "ermoe.tasks.brain_age": "ermoe.brain",
    "ermoe.tasks.brain_age.report": "ermoe.brain.reporting.page",
    "ermoe.tasks.demo": "ermoe.studies.demo",
    "ermoe.tasks.demo_report": "ermoe.studies.demo",
    "ermoe.tasks.image": "ermoe.images",
    "ermoe.tasks.image.inspect": "ermoe.explore.inspect",
    "ermoe.tasks.retrieval": "ermoe.retrieval",
    **{
        f"ermoe.tasks.brain_age.{part}": f"ermoe.brain.reporting.{part}"
        for part in ("card", "derivative", "mosaic", "occlusion", "pictures", "routing_sections")
    },
}

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
        warnings.warn(f"{spec.name} is {home} now: import it from there", DeprecationWarning, stacklevel=2)
        module = import_module(home)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed twice; the import system has put the spec of the old name into the module."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def forward_old_names() -> None:
    """From now on old names import."""
    if not any(isinstance(finder, _Forwarding) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Forwarding())
