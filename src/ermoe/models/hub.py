"""Models on the Hugging Face hub: a repository with what `ermoe.save` writes and a card that says what it is.

What nobody stated is not stated on the card: nothing is guessed.
"""

from __future__ import annotations

import fnmatch
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ermoe._auto_classes import NAME
from ermoe._version import __version__
from ermoe.errors import UserError
from ermoe.files import StrPath, printable
from ermoe.models.backbones import family_name, family_of
from ermoe.models.count import idle_parameters
from ermoe.models.io import CONFIG, INDEX, save, weightless, weights_in
from ermoe.models.upcycle import Options, Sparsity

CARD = "README.md"
_NOT_STATED = "Not stated."
_ON_THE_HUB = re.compile(r"([\w.-]+/)?[\w.-]+")
_NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")  # what huggingface_hub speaks through


@dataclass(frozen=True, slots=True)
class Card:
    """What a model's owner knows of it. All of it may stay unsaid, and the card then says so."""

    license: str | None = None
    """As the hub spells it: apache-2.0, mit, cc-by-nc-4.0, ...."""
    datasets: tuple[str, ...] = ()
    """What the model was trained on; a data set of the hub by its name there (ILSVRC/imagenet-1k)."""
    figures: Mapping[str, float | str] = field(default_factory=dict)
    """What was measured: a name, such as "accuracy on the test images", and its value."""
    base_model: str | None = None
    """The model of the hub that it was made from (owner/name)."""
    about: str | None = None
    """A paragraph in your own words."""
    tags: tuple[str, ...] = ()
    """Words by which the hub finds it, besides ermoe."""

    def text(self, repo: str, model: nn.Module) -> str:
        """The card: what the hub reads, between two lines of dashes, and then what people do.

        >>> import timm
        >>> card = Card(figures={"accuracy": "81.2 %"}).text("me/digits", timm.create_model("test_vit"))
        >>> "pipeline_tag: image-classification" in card, 'ermoe.load("me/digits")' in card
        (True, True)
        >>> print(card[card.index("## Figures") : card.index("## Model")])
        ## Figures
        <BLANKLINE>
        | | |
        | :-- | :-- |
        | accuracy | 81.2 % |
        <BLANKLINE>
        ## Licence
        <BLANKLINE>
        Not stated.
        <BLANKLINE>
        """
        from huggingface_hub import ModelCardData

        sparsity = _sparsity(model)
        tags = ["ermoe", *([] if sparsity is None else ["mixture-of-experts"]), *self.tags]
        data = ModelCardData(
            library_name="ermoe",
            license=self.license,
            datasets=[name for name in self.datasets if _ON_THE_HUB.fullmatch(name)] or None,
            base_model=self.base_model,
            pipeline_tag="image-classification" if _is_classifier(model) else None,
            tags=list(dict.fromkeys(tags)),
        )
        sections = {
            "Use": _how_to_load(repo, model),
            "Data": "\n".join(f"- {name}" for name in self.datasets) or _NOT_STATED,
            "Figures": _table(self.figures) if self.figures else _NOT_STATED,
            "Licence": self.license or _NOT_STATED,
            "Model": _table(_facts(model, sparsity) | {"made from": self.base_model or "not stated"}),
        }
        beginning = [f"---\n{data.to_yaml()}\n---", f"# {repo.partition('/')[2]}", self.about or ""]
        written = [f"## {title}\n\n{body}" for title, body in sections.items()]
        return "\n\n".join(part for part in (*beginning, *written) if part) + "\n"


def push(
    model: nn.Module | StrPath,
    repo: str,
    *,
    license: str | None = None,
    datasets: Sequence[str] = (),
    figures: Mapping[str, float | str] | None = None,
    base_model: str | None = None,
    about: str | None = None,
    tags: Sequence[str] = (),
    private: bool | None = None,
    message: str = "Upload with ermoe",
    args: Options | None = None,
) -> str:
    """Uploads a model, or a folder that `ermoe.save` wrote, to the repository ``repo`` of the Hugging Face hub.

    The repository gets config.json, the weights and a card, README.md, in one commit; it is made if there is
    none. `ermoe.load` takes the model from there. Log in first with ``hf auth login``, or set HF_TOKEN.

    Args:
        model: a model, sparse or dense, or the folder of one.
        repo: "owner/name".
        license: as the hub spells it: "apache-2.0", "mit", …. This and the next five are for the card, which says
            "not stated" where they are not.
        datasets: what the model was trained on; a data set of the hub by its name there.
        figures: what was measured, such as ``{"accuracy on the test images": "81.2 %"}``.
        base_model: the model of the hub that it was made from.
        about: a paragraph in your own words.
        tags: words by which the hub finds it, besides "ermoe".
        private: whether only its owner sees a new repository; by default as the owner's account has it.
        message: of the commit.
        args: as in `ermoe.save`.

    Returns the address of the commit.

    >>> push("my-model", "digits")
    Traceback (most recent call last):
    ...
    ermoe.errors.UserError: digits: name a repository of the hub as owner/name
    """
    _check_name(repo)
    stated = Card(license, _names(datasets), figures or {}, base_model, about, _names(tags))
    with _written(model, args) as (folder, described):
        contents: dict[str, Any] = {file.name: file for file in (folder / CONFIG, *_files(folder))}
        contents[CARD] = stated.text(repo, described).encode()
        with _explained(repo):
            return _upload(contents, repo, private=private, message=message)


def _names(names: Sequence[str]) -> tuple[str, ...]:
    """A single name is one name, and not its letters."""
    return (names,) if isinstance(names, str) else tuple(names)


def _upload(contents: Mapping[str, Any], repo: str, *, private: bool | None, message: str) -> str:
    """One commit with files or bytes by name, without weights of an earlier model; returns its address."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    hub = HfApi(library_name="ermoe", library_version=__version__)
    hub.create_repo(repo, private=private, exist_ok=True)
    additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in contents.items()]
    others = [name for name in fnmatch.filter(hub.list_repo_files(repo), "model*.safetensors*") if name not in contents]
    removals = [CommitOperationDelete(path_in_repo=name) for name in others]
    return str(hub.create_commit(repo, [*additions, *removals], commit_message=message).commit_url)


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        is_valid = repo.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UserError(f"{printable(repo)}: name a repository of the hub as owner/name")


@contextmanager
def _written(model: nn.Module | StrPath, args: Options | None) -> Iterator[tuple[Path, nn.Module]]:
    """A folder with the model's files, whole and fitting, and the model; maybe without its weights."""
    if isinstance(model, nn.Module):
        with tempfile.TemporaryDirectory() as place:
            save(model, place, args=args)
            yield Path(place), model
    elif not Path(model).is_dir():
        raise UserError(f"{printable(model)} is no folder: name one that ermoe.save wrote")
    else:
        described = weightless(model)
        if missing := [file for file in _files(Path(model)) if not file.is_file()]:
            raise UserError(f"{missing[0]} is missing: save the model again")
        yield Path(model), described


def _files(folder: Path) -> list[Path]:
    """The files with its weights, and the index of these if they are several."""
    index = folder / INDEX
    return [*([index] if index.is_file() else []), *weights_in(folder)]


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """What the hub, or the way there, objects to, as one sentence."""
    try:
        yield
    except Exception as problem:
        sentence = _sentence(repo, problem)
        if sentence is None:
            raise
        raise UserError(sentence) from problem


def _sentence(repo: str, problem: BaseException) -> str | None:
    status = getattr(getattr(problem, "response", None), "status_code", None)
    if status == 401:
        return f"the hub does not know who you are: run hf auth login, or set HF_TOKEN, to write to {repo}"
    if status == 403:
        return f"you may not write to {repo}: use a token with the right to write, and a name of your own"
    if status is not None:
        said = getattr(problem, "server_message", None) or type(problem).__name__
        return f"the hub refused {repo} ({status}: {said})"
    if str(problem).startswith("Invalid metadata"):
        return f"the hub does not take the card of {repo}: {' '.join(str(problem).split())}"
    kind = type(problem)
    if kind.__module__.partition(".")[0] in _NETWORK or isinstance(problem, ConnectionError):
        way = f"the hub cannot be reached ({kind.__name__})"
        return f"{way}, and {repo} has no new files: look at your network and at HF_ENDPOINT"
    return None if problem.__cause__ is None else _sentence(repo, problem.__cause__)


def _sparsity(model: nn.Module) -> Sparsity | None:
    sparsity = getattr(family_of(model).backbone(model), "sparsity", None)
    return sparsity if isinstance(sparsity, Sparsity) else None


def _is_classifier(model: nn.Module) -> bool:
    """Whether it names classes of images; models for anything else go into no drawer of the hub."""
    name, family = type(model).__name__, family_name(model)
    return name.endswith("ForImageClassification") or (
        family in ("timm_vit", "timm_eva", "timm_beit", "timm_naflex") and bool(getattr(model, "num_classes", 0))
    )


def _how_to_load(repo: str, model: nn.Module) -> str:
    lines = ["import ermoe", "", f'model = ermoe.load("{repo}").eval()']
    if type(model).__name__.startswith(NAME) and type(model).__name__.endswith("ForImageClassification"):
        lines += ["", "# or, after import ermoe:", "from transformers import AutoModelForImageClassification", ""]
        lines += [f'model = AutoModelForImageClassification.from_pretrained("{repo}")']
    elif _is_classifier(model) and family_name(model).startswith("timm"):
        lines += ["", "# or by timm:", "import ermoe.models.vit", "import timm", ""]
        lines += [f'model = timm.create_model("hf-hub:{repo}", pretrained=True).eval()']
    return "\n".join(["```python", *lines, "```"])


def _facts(model: nn.Module, sparsity: Sparsity | None) -> dict[str, float | str]:
    """What can be read off the model."""
    total = sum(parameter.numel() for parameter in model.parameters())
    facts: dict[str, float | str] = {"architecture": _architecture(model), "parameters": f"{total:,}"}
    if sparsity is not None:
        experts = sparsity.num_experts
        facts |= {
            "of which a token meets": f"{total - idle_parameters(model):,}",
            "blocks with experts": ", ".join(map(str, sparsity.blocks)),
            "experts in a block": ", ".join(map(str, experts)) if isinstance(experts, tuple) else experts,
            "experts a token meets": sparsity.top_k,
            "router": sparsity.router,
        }
    return facts | {"written by": f"ermoe {__version__}"}


def _architecture(model: Any) -> str:
    """timm's name where there is one, the class otherwise."""
    named = getattr(family_of(model).backbone(model), "pretrained_cfg", None) or {}
    return str(named.get("architecture") or type(model).__name__)


def _table(rows: Mapping[str, float | str]) -> str:
    cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in rows.items()]
    return "\n".join(["| | |", "| :-- | :-- |", *(f"| {name} | {value} |" for name, value in cells)])
