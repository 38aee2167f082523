"""The page of an evaluation: figures with intervals, rank curves, similarities, and queries to look at."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from PIL import Image

from ermoe.analysis.page import Markup, Page, figure, grid, heading, svg, table, tiles
from ermoe.data.images import Images
from ermoe.errors import UserError
from ermoe.retrieval import plots
from ermoe.retrieval.captions.protocols import PROTOCOLS
from ermoe.retrieval.evaluation import Answers, Evaluation, table_rows
from ermoe.retrieval.ranking import Ranks, nearest

_EXAMPLES = 3
_THUMBNAIL = 160


def write_report(evaluation: Evaluation, path: str | PathLike[str]) -> Path:
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
    cosines = plots.similarity_histogram(answers.image_ID, answers.text_TD, answers.captions.text_to_image_T)
    curves = svg(plots.rank_curves(answers.retrieval), "rank curves")
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
