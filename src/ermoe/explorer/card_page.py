"""A card as it appears on a page: in the report of `ermoe inspect`, and in the explorer."""

from __future__ import annotations

from importlib.resources import files

import torch

from ermoe.analysis.page import Markup, data_uri, escape
from ermoe.explorer.cards import Card

_SOFTEST = 0.08


def card_style() -> Markup:
    """What a page with cards needs once."""
    return Markup(f"<style>{files('ermoe.explorer').joinpath('card.css').read_text(encoding='utf-8')}</style>")


def card_markup(card: Card, title: str) -> Markup:
    """The card of one expert; numbers that could be chance stand beside those of a shuffle."""
    even = 1 / card.num_experts
    lead = (
        f"Takes {_percent(card.load)} of all choices and {_percent(card.weight)} of the weight "
        f"(equal shares: {_percent(even)}), "
        f"seen on {card.num_images:,} {card.nouns[1]}s."
    )
    return Markup(
        f'<article class="card"><h3>{escape(title)}</h3><p>{lead}</p>'
        f'{_best(card)}<div class="card-columns">{_chance(card)}{_looks(card)}{_tissues(card)}</div>'
        f'<div class="card-columns">{_classes(card)}{_places(card)}{_neighbours(card)}{_words(card)}</div></article>'
    )


def _best(card: Card) -> str:
    patch, patch_of = card.nouns
    cells = (
        f'<li><img src="{data_uri(found.picture)}" alt="{patch_of} {found.image}, {patch} {found.patch}" '
        f'loading="lazy" data-image="{found.image}" data-patch="{found.patch}"><span>{found.score:.2f}</span></li>'
        for found in card.best
    )
    return f'<h4>Highest scores, one {patch} of each {patch_of}</h4><ul class="card-best">{"".join(cells)}</ul>'


def _chance(card: Card) -> str:
    rows = [*([("classes", card.class_bits)] if card.classes else []), ("places", card.place_bits)]
    cells = "".join(
        f"<tr><th scope='row'>{name}</th><td>{own:.2f} bits</td><td>{shuffled:.2f} bits</td></tr>"
        for name, (own, shuffled) in rows
    )
    head = (
        "<tr><th scope='col'>what its choices tell about</th><th scope='col'>it</th><th scope='col'>shuffled</th></tr>"
    )
    return f"<table class='card-table'><thead>{head}</thead><tbody>{cells}</tbody></table>"


def _looks(card: Card) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{own:+.2f} σ</td><td>{shuffled:+.2f} σ</td></tr>"
        for name, (own, shuffled) in card.looks.items()
    )
    head = "<tr><th scope='col'>its patches beside all</th><th scope='col'>it</th><th scope='col'>shuffled</th></tr>"
    return f"<table class='card-table'><thead>{head}</thead><tbody>{rows}</tbody></table>" if rows else ""


def _tissues(card: Card) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{_percent(own)}</td>"
        f"<td>{_percent(shuffled)} ± {_percent(spread)}</td></tr>"
        for name, (own, shuffled, spread) in card.tissues.items()
    )
    head = "<tr><th scope='col'>tissues of its cubes</th><th scope='col'>it</th><th scope='col'>shuffled</th></tr>"
    return f"<table class='card-table'><thead>{head}</thead><tbody>{rows}</tbody></table>" if rows else ""


def _classes(card: Card) -> str:
    if not card.classes:
        return ""
    rows = "".join(f"<li>{escape(name)} <b>{_percent(share)}</b></li>" for name, share in card.classes)
    note = f"Share of a class's choices. Shuffled, the first would have {_percent(card.best_shuffled)}."
    return f"<div><h4>Classes</h4><ol>{rows}</ol><p>{note}</p></div>"


def _places(card: Card) -> str:
    """Small maps of an image, or of a brain from three sides: the stronger the colour, the larger its share there."""
    highest = max(2 / card.num_experts, *(float(torch.nan_to_num(own).max()) for own in card.places.values()))
    shown = "".join(_map(name, own, highest) for name, own in card.places.items())
    return f"<div><h4>Places</h4>{shown}</div>"


def _map(name: str, places_hw: torch.Tensor, highest: float) -> str:
    """One of them; nothing is drawn where nobody chooses."""
    height, width = places_hw.shape
    known = places_hw[~places_hw.isnan()]
    cells = "".join(
        f'<rect x="{c}" y="{r}" width="1.02" height="1.02" '
        f'fill-opacity="{_SOFTEST + (1 - _SOFTEST) * float(places_hw[r, c]) / highest:.2f}"/>'
        for r in range(height)
        for c in range(width)
        if not places_hw[r, c].isnan()
    )
    of = f"{name.capitalize()} view: share" if name else "Share"
    label = escape(f"{of} of the choices at each place, from {_percent(known.min())} to {_percent(known.max())}")
    return (
        f'<svg class="card-places" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}">{cells}</svg><p>{label}.</p>'
    )


def _neighbours(card: Card) -> str:
    if not card.neighbours:
        return ""
    rows = "".join(
        f"<li>expert {e} <b>{overlap:.2f}</b> <span>{angle:.0f}°</span></li>"
        for e, overlap, angle in card.neighbours[:3]
    )
    note = f"Overlap of what they compare a {card.nouns[0]} with, and the smallest angle between."
    return f"<div><h4>Neighbours</h4><ol>{rows}</ol><p>{note}</p></div>"


def _words(card: Card) -> str:
    if not card.words:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in card.words)
    return f"<div><h4>Captions nearest to what it takes</h4><ol>{rows}</ol></div>"


def _percent(share: float | torch.Tensor) -> str:
    return f"{100 * float(share):.{1 if share < 0.0995 else 0}f}\u00a0%"
