"""Which number of a segmentation stands for which tissue: only ever what a table says.

1 is CSF to one tool, grey matter to the next, and a left ventricle to a third.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from ermoe.brain.data.scans import TISSUES, Tissue
from ermoe.brain.data.table import read_table
from ermoe.errors import UserError

Codes = dict[Tissue, tuple[int, ...]]

_NAMES: dict[str, Tissue] = {
    "wm": "wm", "whitematter": "wm", "cerebralwhitematter": "wm",
    "gm": "gm", "graymatter": "gm", "greymatter": "gm",
    "cgm": "gm", "corticalgraymatter": "gm", "corticalgreymatter": "gm",
    "sgm": "gm", "subcorticalgraymatter": "gm", "subcorticalgreymatter": "gm",
    "csf": "csf", "cerebrospinalfluid": "csf",
}  # fmt: skip


def codes_from_table(path: Path) -> Codes:
    """The codes of a BIDS ``dseg.tsv``, by its columns ``abbreviation`` or ``name``.

    A name must be the whole tissue. "Left-Cerebral-White-Matter" is one part of FreeSurfer's segmentation, which is
    read as tissue only when it is asked for.
    """
    table = read_table(path)
    if not table.has("index") or not (table.has("name") or table.has("abbreviation")):
        raise UserError(f"{path} needs the columns index and name to say which number is which tissue")
    codes: dict[Tissue, list[int]] = {tissue: [] for tissue in TISSUES}
    for row in table.rows:
        tissue = _tissue(row.get("abbreviation", "")) or _tissue(row.get("name", ""))
        if tissue is not None:
            codes[tissue].append(_number(path, row["index"]))
    unnamed = [tissue for tissue in TISSUES if not codes[tissue]]
    if unnamed:
        raise UserError(
            f"{path} has no row for {', '.join(unnamed)}: name white matter, grey matter and cerebrospinal fluid in "
            "it; for FreeSurfer's labels use --tissue-from aseg"
        )
    return {tissue: tuple(numbers) for tissue, numbers in codes.items()}


def aseg_codes() -> Codes:
    """The labels of FreeSurfer's aseg and aparc+aseg, by tissue, from the table that is shipped.

    >>> aseg_codes()["wm"][:2]
    (2, 7)
    """
    with resources.as_file(resources.files("ermoe.brain.data") / "aseg.tsv") as path:
        table = read_table(path)
    codes: dict[Tissue, list[int]] = {tissue: [] for tissue in TISSUES}
    for row in table.rows:
        first, _, last = row["index"].partition("-")
        codes[_NAMES[row["tissue"]]] += range(int(first), int(last or first) + 1)
    return {tissue: tuple(numbers) for tissue, numbers in codes.items()}


def _tissue(text: str) -> Tissue | None:
    return _NAMES.get(re.sub(r"[\s_-]+", "", text.casefold()))


def _number(path: Path, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{path} has the index {text!r}, which is not a whole number") from None
