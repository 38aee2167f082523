"""The page of an evaluation: figures with intervals, rank curves, similarities, and queries to look at.

Letters: I images, T texts, D width, B bins.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ermoe.analysis.page import Markup, Page, figure, grid, heading, svg, table, tiles
from ermoe.analysis.plots import ACCENT, MUTED, Curve, Scale, curves, panel
from ermoe.data.images import Images
from ermoe.errors import UserError
from ermoe.files import StrPath
from ermoe.retrieval.captions.protocols import PROTOCOLS
from ermoe.retrieval.evaluation import Answers, Evaluation, table_rows
from ermoe.retrieval.figures import Ranks, Retrieval, nearest

_EXAMPLES = 3
_THUMBNAIL = 160
_WARM = "#c8553d"
_SAMPLED = 1000
_BINS = 100


def write_report(evaluation: Evaluation, path: StrPath) -> Path:
    """Writes the page; needs an evaluation that was just made, not one read from its record."""
    answers = evaluation.answers
    if answers is None:
        raise UserError("this evaluation was read from its record, which holds no queries to show: use --again")
    record = evaluation.record
    page = Page(
        f"Retrieval on {record['protocol']}, {record['split']}",
        f"The pool: {PROTOCOLS[record['protocol']].about}.",
        {
            "images": f"{record['num_images']:,}",
            "captions": f"{record['num_captions']:,}",
            "RSUM": f"{record['figures']['rsum']:.1f}",
            "median ranks": f"{record['figures']['i2t_median_rank']:g} / {record['figures']['t2i_median_rank']:g}",
            "tied queries": f"{record['tied_queries']:,}",
            "reads of this split": str(record["reads"]),
        },
    )
    page.section(
        "Recall",
        "Per cent of queries that find a match among the first 1, 5 and 10; intervals of 95 % by drawing images anew. "
        "Ties count against the model.",
        [table(*table_rows(record), strong="RSUM")],
    )
    page.section("How soon a match is found", "The higher and further left, the better.", [_curves(answers)])
    page.section(
        "Best and worst captions",
        "The first image of each row is the caption's own; the four after it are what the model finds first.",
        _caption_queries(answers),
    )
    page.section(
        "Best and worst images",
        "An image and the five captions that the model finds first; its own are marked.",
        _image_queries(answers),
    )
    return page.write(path)


def _curves(answers: Answers) -> Markup:
    cosines = _similarity_histogram(answers.image_ID, answers.text_TD, answers.captions.text_to_image_T)
    curves = svg(_rank_curves(answers.retrieval), "rank curves")
    return grid(
        [
            figure(curves, "Rank curves", "Dashed: a random order."),
            figure(svg(cosines, "cosines of pairs"), "Similarities", "Right pairs should stand apart from wrong ones."),
        ],
        pairs=True,
    )


def _caption_queries(answers: Answers) -> list[Markup]:
    captions, blocks = answers.captions, []
    for text, rank in _extremes(answers.retrieval.text_to_image):
        own = int(captions.text_to_image_T[text])
        shown = [(thumbnail(captions.images, own), "its own image")]
        shown += [
            (thumbnail(captions.images, image), f"cosine {cosine:.2f}")
            for image, cosine in nearest(answers.text_TD[text], answers.image_ID, 4)
        ]
        blocks += [heading(f"“{captions.texts[text]}”, rank {rank + 1:,}"), tiles(shown)]
    return blocks


def _image_queries(answers: Answers) -> list[Markup]:
    captions, blocks = answers.captions, []
    for image, rank in _extremes(answers.retrieval.image_to_text):
        rows = [
            [captions.texts[text], f"{cosine:.2f}", "own" if int(captions.text_to_image_T[text]) == image else ""]
            for text, cosine in nearest(answers.image_ID[image], answers.text_TD, 5)
        ]
        picture = tiles([(thumbnail(captions.images, image), captions.texts_of(image)[0])])
        blocks += [heading(f"rank {rank + 1:,}"), picture, table(["found first", "cosine", ""], rows)]
    return blocks


def _extremes(ranks: Ranks) -> list[tuple[int, int]]:
    """(query, rank) of a few queries with the lowest ranks, then of a few with the highest, worst last.

    >>> import torch
    >>> ranks = torch.tensor([5, 0, 7, 1, 9, 2, 8])
    >>> _extremes(Ranks(ranks, torch.zeros(7), torch.zeros(7), num_candidates=10))
    [(1, 0), (3, 1), (5, 2), (2, 7), (6, 8), (4, 9)]
    """
    rank_Q = ranks.zero_based().long()
    order = rank_Q.argsort(stable=True).tolist()
    chosen = order[:_EXAMPLES] + order[max(_EXAMPLES, len(order) - _EXAMPLES) :]
    return [(query, int(rank_Q[query])) for query in chosen]


def thumbnail(images: Images, index: int) -> Image.Image:
    """One image, small."""
    picture = Image.fromarray(images.read(index).permute(1, 2, 0).numpy())
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return picture


def _rank_curves(retrieval: Retrieval) -> Figure:
    """The share of queries that are answered within the first k, for every k, beside a random order.

    Ties count against the model; k is on a logarithmic axis.
    """
    lines, colours = {}, []
    directions = ("image → text", retrieval.image_to_text, ACCENT), ("text → image", retrieval.text_to_image, _WARM)
    for side, (name, ranks, colour) in enumerate(directions):
        rank_Q = np.sort(ranks.zero_based().numpy())
        cuts = np.unique(np.geomspace(1, ranks.num_candidates, 60).astype(int))
        share = np.searchsorted(rank_Q, cuts - 1, side="right") / len(rank_Q)
        lines[name] = Curve(cuts.tolist(), share.tolist())
        # A name that begins with "_" stays out of the legend.
        near = cuts[cuts <= 1000].tolist()
        lines[f"_{name}, random order"] = Curve(near, [retrieval.chance(k)[side] for k in near], dashed=True)
        colours += [colour, colour]
    return curves(lines, colours, Scale("first k candidates", "queries answered", percent=True, log_x=True))


def _similarity_histogram(image_ID: Tensor, text_TD: Tensor, text_to_image_T: Tensor) -> Figure:
    """Cosines of right pairs and of wrong ones; wrong ones are those of at most 1,000 images, evenly spaced."""
    right, wrong, edge = similarities(image_ID, text_TD, text_to_image_T)
    with panel(2.7) as (drawing, axes):
        for name, count, colour in (("wrong pairs", wrong, MUTED), ("right pairs", right, ACCENT)):
            share = count / max(count.sum(), 1)
            axes.stairs(share, edge, fill=True, color=colour, alpha=0.22)
            axes.stairs(share, edge, color=colour, linewidth=1.3, label=name)
        seen = edge[:-1][(right + wrong) > 0]
        axes.set_xlim(seen.min() - 0.05, seen.max() + 0.07)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("cosine similarity")
        axes.legend(loc="upper left", handlelength=1.2, borderaxespad=0)
    return drawing


def similarities(
    image_ID: Tensor, text_TD: Tensor, text_to_image_T: Tensor
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Histograms (B,) of right and of wrong pairs, and the edges of the bins (B + 1,) from −1 to 1."""
    edge = np.linspace(-1, 1, _BINS + 1)
    right_T = (image_ID[text_to_image_T] * text_TD).sum(-1).clamp(-1, 1)
    right = np.histogram(right_T.numpy(), edge)[0].astype(float)
    wrong = np.zeros(_BINS)
    for image in range(0, len(image_ID), -(-len(image_ID) // _SAMPLED)):
        score_T = (text_TD @ image_ID[image])[text_to_image_T != image].clamp(-1, 1)
        wrong += torch.histc(score_T.float(), _BINS, -1, 1).numpy()
    return right, wrong, edge
