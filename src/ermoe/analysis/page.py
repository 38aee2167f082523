"""One HTML file that needs nothing else: no network, readable on a phone, printable.

Text goes in as text and is escaped here; whatever is markup already is a `Markup`, made by one of these functions.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NewType

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from ermoe._version import __version__
from ermoe.errors import harmless
from ermoe.files import StrPath, replacing

Markup = NewType("Markup", str)
"""HTML that is safe to put on the page as it is."""


def escape(text: str) -> str:
    """Text as it is to appear on a page, whatever it holds."""
    return html.escape(harmless(text))


class Page:
    """A page that grows section by section and is written at once.

    >>> page = Page("Routing of <my model>", facts={"layers": "2"})
    >>> page.section("Load", "How evenly the experts are used.", [table(["layer"], [["blocks.1"]])])
    >>> "Routing of &lt;my model&gt;" in page.html()
    True
    """

    def __init__(self, title: str, lead: str = "", facts: dict[str, str] | None = None) -> None:
        self.title = title
        self._header = [f'<p class="lead">{escape(lead)}</p>'] if lead else []
        if facts:
            items = "".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in facts.items())
            self._header.append(f'<ul class="facts">{items}</ul>')
        self._sections: list[str] = []
        self._headings: list[str] = []
        self._scripts: list[str] = []

    def section(self, title: str, lead: str, blocks: Iterable[Markup]) -> None:
        """Appends a heading, a sentence that says what to look for, and what there is to see."""
        body = "\n".join(blocks)
        self._headings.append(title)
        self._sections.append(
            f'<section id="{_anchor(title)}">\n<h2>{escape(title)}</h2>\n<p class="lead">{escape(lead)}</p>\n{body}\n'
            "</section>"
        )

    def contents(self) -> None:
        """Puts links to the sections so far below the title."""
        links = "".join(f'<li><a href="#{_anchor(title)}">{escape(title)}</a></li>' for title in self._headings)
        self._header.append(f'<nav><ul class="contents">{links}</ul></nav>')

    def script(self, name: str) -> None:
        """Lets the page run a script that comes with this package, after everything else."""
        text = files("ermoe.analysis").joinpath(name).read_text(encoding="utf-8")
        self._scripts.append(f"<script>\n{text}</script>")

    def html(self) -> str:
        """The whole page."""
        template = Template(files("ermoe.analysis").joinpath("page.html").read_text(encoding="utf-8"))
        return template.substitute(
            title=escape(self.title),
            version=escape(__version__),
            header="\n".join(self._header),
            body="\n".join(self._sections),
            footer=f"Written by ermoe {escape(__version__)}.",
            scripts="\n".join(self._scripts),
        )

    def write(self, path: StrPath) -> Path:
        """Writes the page in one step, in place of an older one."""
        with replacing(path) as draft:
            draft.write_text(self.html(), encoding="utf-8")
        return Path(path)


def grid(blocks: Iterable[Markup], *, pairs: bool = False) -> Markup:
    """Side by side where there is room (at most two with ``pairs``), below each other on a phone."""
    kind = "grid pairs" if pairs else "grid"
    return Markup(f'<div class="{kind}">\n' + "\n".join(blocks) + "\n</div>")


def figure(content: Markup, title: str, caption: str = "", *, source: str = "") -> Markup:
    """A framed picture with a title in bold, a sentence, and the name under which its files lie beside the page."""
    files_ = f' <code class="source">{escape(source)}</code>' if source else ""
    text = f"<b>{escape(title)}</b> {escape(caption)}{files_}"
    return Markup(f"<figure>\n{content}\n<figcaption>{text}</figcaption>\n</figure>")


def heading(text: str) -> Markup:
    """A heading within a section."""
    return Markup(f"<h3>{escape(text)}</h3>")


def bullets(lines: Iterable[str]) -> Markup:
    """Sentences, one below the other."""
    return Markup("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    notes: Sequence[str] | None = None,
    strong: str | None = None,
) -> Markup:
    """A table that scrolls sideways if it must, with a last column of ``notes``; row ``strong`` stands out.

    Where it is crowded, an interval in brackets goes below its figure.
    """
    columns = [*header, *([] if notes is None else ["note"])]
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in columns)
    body = []
    for index, (first, *rest) in enumerate(rows):
        cells = "".join(f"<td>{escape(cell).replace(' [', ' <wbr>[')}</td>" for cell in rest)
        note = "" if notes is None else f'<td class="note">{escape(notes[index])}</td>'
        kind = ' class="strong"' if first == strong else ""
        body.append(f'<tr{kind}><th scope="row">{escape(first)}</th>{cells}{note}</tr>')
    lines = ["<thead><tr>" + head + "</tr></thead>", "<tbody>", *body, "</tbody>"]
    # What scrolls can be reached with Tab, so that arrow keys move it.
    frame = f'<div class="scroll" tabindex="0" role="group" aria-label="Table by {escape(header[0])}">'
    return Markup(f"{frame}<table>\n" + "\n".join(lines) + "\n</table></div>")


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """(name, colour) pairs as swatches."""
    swatches = (f'<li><i style="background:{escape(colour)}"></i>{escape(name)}</li>' for name, colour in entries)
    return Markup('<ul class="legend">' + "".join(swatches) + "</ul>")


def tiles(images: Iterable[tuple[Image.Image, str]]) -> Markup:
    """Small (image, description) pairs, five a row."""
    cells = (f'<img src="{data_uri(image)}" alt="{escape(text)}">' for image, text in images)
    return Markup('<div class="tiles">' + "".join(cells) + "</div>")


def data_uri(image: Image.Image) -> str:
    """An image as an address that holds it."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=90, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def svg(drawing: Figure, description: str) -> Markup:
    """A matplotlib figure as inline SVG that takes the page's font and keeps its text as text."""
    return inline_svg(svg_text(drawing, description), description)


def svg_text(drawing: Figure, description: str) -> str:
    """A matplotlib figure as an SVG file, the same every time. Its layout is settled afterwards."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": description}):
        drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawing.set_layout_engine("none")  # whoever saves it again need not lay it out again
    return buffer.getvalue()


def inline_svg(text: str, description: str) -> Markup:
    """What `svg_text` made, for the inside of a page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # known to every HTML parser, and no address belongs on the page
    text = re.sub(r' id="[a-z]+\w*_\d+"', "", text)  # "axes_1" and the like, the same in every figure
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    text = text.replace(' target="_blank"', "")  # links lead to places on the page
    text = re.sub(r'<svg width="[^"]*" height="[^"]*"', f'<svg role="img" aria-label="{escape(description)}"', text)
    return Markup(re.sub(r"\s*\n\s*", "\n", text).strip())


def _anchor(title: str) -> str:
    """The name of a section in links.

    >>> _anchor("Where the patches go")
    'where-the-patches-go'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
