"""``ermoe push``: a saved model on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console

from ermoe.console import say
from ermoe.errors import UserError


@dataclass(frozen=True, slots=True)
class Push:
    """Upload a saved model to the Hugging Face hub, with a card that says what it is.

    Log in first with hf auth login, or set HF_TOKEN. On the card, what is not given below is "not stated".
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, or a model folder."""
    repo: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OWNER/NAME")]
    """The repository; it is made if there is none."""
    license: str | None = None
    """As the hub spells it: apache-2.0, mit, cc-by-nc-4.0 and so on."""
    datasets: tuple[str, ...] = ()
    """What the model was trained on; a data set of the hub by its name there."""
    figures: tuple[str, ...] = ()
    """What was measured, each as NAME=VALUE: "accuracy on the test images=81.2 %"."""
    base_model: str | None = None
    """The model of the hub that it was made from (owner/name)."""
    about: str | None = None
    """A paragraph in your own words."""
    tags: tuple[str, ...] = ()
    """Words by which the hub finds it, besides ermoe."""
    visibility: Literal["public", "private"] | None = None
    """Who sees a new repository, everybody or its owner; by default as the owner's account has it."""

    def __call__(self, console: Console) -> None:
        figures = dict(_figure(text) for text in self.figures)
        from ermoe.models.hub import push
        from ermoe.train.run_folder import model_folder

        address = push(
            model_folder(self.model),
            self.repo,
            license=self.license,
            datasets=self.datasets,
            figures=figures,
            base_model=self.base_model,
            about=self.about,
            tags=self.tags,
            private=None if self.visibility is None else self.visibility == "private",
        )
        say(console, f'{address}\nermoe.load("{self.repo}") gives it back')


def _figure(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UserError(f"--figures {text}: write NAME=VALUE, for example accuracy=81.2")
    return name, value
