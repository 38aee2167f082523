"""Finding T1 scans, masks and segmentations in a BIDS tree, by the entities in file names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from ermoe.data.reading import is_hidden

_OF_DERIVATIVES = {"desc", "label", "space", "res", "den", "atlas", "seg", "hemi"}
_NATIVE_SPACES = {None, "T1w", "orig", "scanner"}
_SUFFIXES = (".nii.gz", ".nii")


@dataclass(frozen=True, slots=True)
class Name:
    """A BIDS file name taken apart.

    >>> Name.of(Path("sub-01_ses-2_run-1_T1w.nii.gz"))
    Name(entities={'sub': '01', 'ses': '2', 'run': '1'}, suffix='T1w')
    """

    entities: dict[str, str]
    suffix: str

    @classmethod
    def of(cls, path: Path) -> Name:
        *parts, suffix = stem(path).split("_")
        pairs = (part.partition("-") for part in parts)
        return cls({key: value for key, dash, value in pairs if dash}, suffix)


def stem(path: Path) -> str:
    """The file name without .nii, .nii.gz, .tsv, …

    >>> stem(Path("a/sub-01_T1w.nii.gz")), stem(Path("head 3.5 mm.nii.gz"))
    ('sub-01_T1w', 'head 3.5 mm')
    """
    return Path(path.stem).stem if path.suffix.casefold() == ".gz" else path.stem


@dataclass(slots=True)
class Choice:
    """The T1 of one session, and what was passed over for it."""

    participant_id: str
    session_id: str | None
    t1: Path | None
    passed_over: list[Path] = field(default_factory=list)
    with_contrast: list[Path] = field(default_factory=list)
    elsewhere: list[Path] = field(default_factory=list)
    """T1s in another space than their own, for example MNI."""


def is_bids_root(folder: Path) -> bool:
    """Whether there are subject folders that hold images, or the file every BIDS set has."""
    return (folder / "dataset_description.json").is_file() or any(_session_folders(folder))


def choose_t1s(root: Path, rule: str) -> list[Choice]:
    """One T1 for every session that has any.

    ``rule``: "first" takes the one with the fewest entities, then the lowest run, then the first name; "last" the
    highest run instead; anything else is a pattern for file names, and "first" decides among those that match.
    """
    return [
        _choose(participant_id, session_id, folder, rule)
        for participant_id, session_id, folder in _session_folders(root)
    ]


def _session_folders(root: Path) -> Iterator[tuple[str, str | None, Path]]:
    """(participant, session or None, folder with an anat folder)."""
    for subject in sorted(path for path in root.glob("sub-*") if path.is_dir()):
        if (subject / "anat").is_dir():
            yield subject.name, None, subject
        for session in sorted(path for path in subject.glob("ses-*") if (path / "anat").is_dir()):
            yield subject.name, session.name, session


def _choose(participant_id: str, session_id: str | None, folder: Path, rule: str) -> Choice:
    choice = Choice(participant_id, session_id, None)
    candidates = []
    for path in images(folder / "anat", "T1w"):
        entities = Name.of(path).entities
        if "ce" in entities:
            choice.with_contrast.append(path)
        elif entities.get("space") not in _NATIVE_SPACES:
            choice.elsewhere.append(path)
        elif rule in ("first", "last") or fnmatch(path.name, rule):
            candidates.append(path)
        else:
            choice.passed_over.append(path)
    if candidates:
        choice.t1, *rest = sorted(candidates, key=lambda path: _rank(path, last_run=rule == "last"))
        choice.passed_over += rest
    return choice


def _rank(path: Path, *, last_run: bool) -> tuple[int, int, str]:
    entities = dict(Name.of(path).entities)
    run = entities.pop("run", "0")
    number = int(run) if run.isdecimal() else 0
    return len(entities), -number if last_run else number, path.name


def images(folder: Path, suffix: str) -> list[Path]:
    """NIfTI files of a folder with a BIDS suffix; of twins packed and unpacked, the packed one."""
    found: dict[str, Path] = {}
    for extension in _SUFFIXES:
        for path in sorted(path for path in folder.glob(f"*_{suffix}{extension}") if not is_hidden(path)):
            found.setdefault(stem(path), path)
    return [found[name] for name in sorted(found)]


def pipelines(root: Path) -> list[Path]:
    """The folders of derivatives of a data set, and the set itself, which may be one."""
    derivatives = root / "derivatives"
    inside = sorted(path for path in derivatives.iterdir() if path.is_dir()) if derivatives.is_dir() else []
    loose = [derivatives] if any(derivatives.glob("sub-*")) else []
    return [*inside, *loose, root]


def derived(folder: Path, suffix: str, t1: Path) -> list[Path]:
    """Images with a suffix in a folder that belong to a T1, in its own space, plainest name first."""
    own = Name.of(t1).entities
    fitting = [path for path in images(folder, suffix) if _belongs(Name.of(path).entities, own)]
    return sorted(fitting, key=lambda path: (len(Name.of(path).entities), path.name))


def _belongs(entities: dict[str, str], own: dict[str, str]) -> bool:
    """A derivative may leave entities of its T1 out, as pipelines that average runs do, but not contradict them."""
    if entities.get("space") not in _NATIVE_SPACES:
        return False
    said = {key: value for key, value in entities.items() if key not in _OF_DERIVATIVES}
    return all(own.get(key) == value for key, value in said.items())


def session_folder(pipeline: Path, participant_id: str, session_id: str | None) -> Path:
    """Where a pipeline keeps the anatomy of a session."""
    return pipeline / participant_id / (session_id or ".") / "anat"


def lookup_table(image: Path, stop_at: Path) -> Path | None:
    """The TSV that explains a dseg, by BIDS's principle of inheritance: nearest folder first, plainest name last."""
    name = Name.of(image)
    for folder in _upwards(image.parent, stop_at):
        seen = (path for path in folder.glob(f"*{name.suffix}.tsv") if not is_hidden(path))
        tables = [path for path in seen if _inherits(Name.of(path), name)]
        if tables:
            return max(tables, key=lambda path: (len(Name.of(path).entities), path.name))
    return None


def _inherits(general: Name, special: Name) -> bool:
    return general.suffix == special.suffix and general.entities.items() <= special.entities.items()


def _upwards(folder: Path, stop_at: Path) -> Iterable[Path]:
    yield folder
    while folder != stop_at and folder != folder.parent:
        folder = folder.parent
        yield folder
