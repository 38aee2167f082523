"""A figure for a named protocol: the right pool, no training image in it, read once, and written down.

Whoever looks at a test split twice chooses by it. So the record of an evaluation lies beside the model, a second one
shows the first, and one that is forced counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from ermoe.errors import UserError
from ermoe.files import StrPath, read_json, write_json
from ermoe.retrieval.build import load_clip, save_id
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.retrieval.captions.schema import CaptionSet, id_hash
from ermoe.retrieval.clip.model import CLIP, UNKNOWN_PRETRAINING
from ermoe.retrieval.clip.towers import tokenise
from ermoe.retrieval.encode import encode_images, encode_tokens
from ermoe.retrieval.figures import CUTS, RECALLS, Retrieval, retrieve
from ermoe.train.compute import Compute
from ermoe.train.run_folder import RunFolder

_TIES = {"middle": "ties half", "for": "ties in favour"}


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model answered on a pool: unit vectors of images (I, D) and texts (T, D), and how they rank."""

    captions: CaptionSet
    image_ID: Tensor
    text_TD: Tensor
    retrieval: Retrieval


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The record that is kept, its file and, unless it was read from there, the answers it came from."""

    record: dict[str, Any]
    path: Path
    answers: Answers | None = None

    @property
    def figures(self) -> dict[str, float]:
        """Recalls in both directions, ``i2t_r1`` to ``t2i_r10``, median ranks and ``rsum``."""
        return dict(self.record["figures"])


def evaluate(
    model: StrPath,
    data: StrPath,
    protocol: str = "custom",
    *,
    split: str = "test",
    images: StrPath | None = None,
    again: bool = False,
    batch_size: int = 100,
    draws: int = 1000,
    compute: Compute | None = None,
) -> Evaluation:
    """Ranks a split of a protocol with the model that dev chose, in both directions.

    The record is written beside the model, see `record_path`. If there is one of this model and this very pool, it is
    returned instead, unless ``again`` asks for another look, which the record counts; dev may be read at will.

    Args:
        model: a run folder, a model folder, or a repository of the hub.
        data, protocol, split, images: see `ermoe.open_captions`.
        again: read the split another time.
        batch_size: images at a time.
        draws: of images, for the intervals.
        compute: device, processes and workers.
    """
    if draws < 1:
        raise UserError(f"draws={draws}: intervals need at least 1")
    compute = Compute() if compute is None else compute
    clip = load_clip(model, device=compute.device)
    captions = open_captions(data, protocol, split, images=images)
    _refuse_training_images(clip, captions)
    path, save = record_path(model, captions), save_id(model)
    earlier = _earlier(path, captions.fingerprint)
    if earlier is not None and not again and split != "dev" and earlier["save"] == save:
        return Evaluation(earlier, path)
    tokens = tokenise(captions.texts, clip.context_length)
    image_ID = encode_images(clip, captions.images, batch_size=batch_size, compute=compute)
    text_TD = encode_tokens(clip, tokens.id_TL, compute=compute)
    retrieval = retrieve(image_ID, text_TD, captions.text_to_image_T)
    record = {
        "protocol": protocol,
        "split": split,
        "num_images": len(captions),
        "num_captions": len(captions.texts),
        "cut_captions": tokens.num_cut,
        "pool": captions.fingerprint,
        "found": captions.summary,
        "model": os.fspath(model),
        "save": save,
        "training_images": training_images(clip),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "reads": 1 + (0 if earlier is None else earlier["reads"]),
        **_summary(retrieval, draws),
    }
    if compute.group.is_main and path.parent.is_dir():
        write_json(path, record)
    return Evaluation(record, path, Answers(captions, image_ID, text_TD, retrieval))


def _summary(retrieval: Retrieval, draws: int) -> dict[str, Any]:
    """Figures with ties counted against the model, their intervals, chance, and other countings where they differ."""
    chance = {k: retrieval.chance(k) for k in CUTS}
    return {
        "figures": retrieval.figures(),
        "intervals_95": retrieval.intervals(draws=draws),
        "chance": {f"{d}_r{k}": chance[k][i] for i, d in enumerate(("i2t", "t2i")) for k in CUTS},
        "tied_queries": retrieval.num_tied,
        "other_ties": retrieval.other_ties(),
    }


def table_rows(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, one a figure: recalls in per cent, intervals, chance, and other countings of ties."""
    figures, intervals, chance = record["figures"], record["intervals_95"], record["chance"]
    header = ["", "recall, %", "95 % interval", "random order", *(_TIES[ties] for ties in record["other_ties"])]
    rows = []
    for name in RECALLS:
        low, high = intervals[name]
        others = [f"{100 * other[name]:.1f}" for other in record["other_ties"].values()]
        label = name.upper().replace("_R", " R@")
        cells = [f"{100 * figures[name]:.1f}", f"{100 * low:.1f} – {100 * high:.1f}", f"{100 * chance[name]:.2f}"]
        rows.append([label, *cells, *others])
    low, high = intervals["rsum"]
    others = [f"{other['rsum']:.1f}" for other in record["other_ties"].values()]
    rows.append(["RSUM", f"{figures['rsum']:.1f}", f"{low:.1f} – {high:.1f}", "", *others])
    return header, rows


def _refuse_training_images(model: CLIP, captions: CaptionSet) -> None:
    """Raises if a pool holds an image that the model was trained on."""
    known = set(model.trained_on.tolist())
    seen = [name for name in captions.ids if id_hash(name) in known]
    if seen:
        raise UserError(
            f"{len(seen):,} of the {len(captions):,} images of {captions.protocol}, {captions.split}, were training "
            f"images of this model, among them {seen[0]}: choose a protocol that goes with its training data"
        )


def training_images(model: CLIP) -> int | str:
    """How many training images a model knows of, and whether there were others before."""
    known = model.trained_on.tolist()
    if id_hash(UNKNOWN_PRETRAINING) not in known:
        return len(known) or "unknown"
    return f"{len(known) - 1:,}, and unknown ones before" if len(known) > 1 else "unknown"


def record_path(model: StrPath, captions: CaptionSet) -> Path:
    """``retrieval-PROTOCOL-SPLIT.json`` beside the model, or in the run folder that it is the best of.

    A custom pool is known by its fingerprint: ``retrieval-custom-FINGERPRINT-SPLIT.json``.
    """
    home = Path(model)
    run = RunFolder(home.parent.parent)
    home = run.folder if run.best == home and run.config.is_file() else home
    pool = f"{captions.protocol}-{captions.fingerprint}" if captions.protocol == "custom" else captions.protocol
    return home / f"retrieval-{pool}-{captions.split}.json"


def _earlier(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """The record there, if it is of the same pool."""
    if not path.is_file():
        return None
    remedy = "remove it to evaluate anew"
    record: Any = read_json(path, remedy)
    if not isinstance(record, dict) or "pool" not in record:
        raise UserError(f"{path} is damaged: {remedy}")
    return record if record["pool"] == fingerprint else None
