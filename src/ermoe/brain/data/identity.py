"""When two spellings mean one person: other case, other padding, spaces, or a missing prefix.

A person spelled in two ways would be two people to a split, and would be trained on and tested.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable

PREFIX = "sub-"


def canonical_id(participant_id: str) -> str:
    """What all spellings of an id have in common.

    >>> [canonical_id(spelling) for spelling in ("sub-007", "SUB-7 ", "07", "sub-IXI012")]
    ['7', '7', '7', 'ixi12']
    """
    bare = re.sub(r"\s+", "", unicodedata.normalize("NFKC", participant_id)).casefold().removeprefix(PREFIX)
    return re.sub(r"\d+", lambda digits: str(int(digits[0])), bare)


def look_alikes(participant_ids: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of different spellings of what may be one person.

    >>> look_alikes(["sub-01", "sub-1", "sub-02", "sub-02"])
    [('sub-01', 'sub-1')]
    """
    spellings: dict[str, set[str]] = defaultdict(set)
    for participant_id in participant_ids:
        spellings[canonical_id(participant_id)].add(participant_id)
    return sorted(tuple(sorted(group)) for group in spellings.values() if len(group) > 1)


def prefixed(label: str, prefix: str = PREFIX) -> str:
    """A label with its BIDS prefix.

    >>> prefixed("01"), prefixed("sub-01"), prefixed("2", "ses-")
    ('sub-01', 'sub-01', 'ses-2')
    """
    return label if label.casefold().startswith(prefix) else prefix + label
