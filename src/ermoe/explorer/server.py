"""What the explorer's page asks for: models, pictures, looks at them, attention, cards.

One thread computes; what waits for it is counted, and beyond a limit turned away, so that many requests at once cost
time and no memory.
"""

from __future__ import annotations

import io
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ermoe._version import __version__
from ermoe.errors import UserError
from ermoe.explorer.card_page import card_markup
from ermoe.explorer.cards import Card
from ermoe.explorer.guard import Guard, TooLargeError, too_large
from ermoe.explorer.look import Change
from ermoe.explorer.pictures import LARGEST_UPLOAD, Pictures
from ermoe.explorer.search import Search
from ermoe.explorer.subject import Subject

_STATIC = {f"{name}.js": "text/javascript" for name in ("explore", "panel", "draw", "link", "ask", "brain")}
_STATIC |= {f"{name}.css": "text/css" for name in ("explore", "card")}
_LARGEST_QUESTION = 2**16
_MOST_WAITING = 64
_UPLOADS_AT_ONCE = 8
_GALLERY = 24
_LONGEST_QUERY = 500
_THUMBNAIL = 128
_PAUSE = 1.5  # seconds without a question after which cards are worked on
_Found = TypeVar("_Found")
_log = logging.getLogger("ermoe")


class Desk:
    """A page, what it may ask for, and the one thread that computes the answers."""

    page = "explore.html"

    def __init__(self) -> None:
        self._compute = threading.Lock()
        self._waiting = 0
        self._asked = time.monotonic()
        self._closed = threading.Event()
        self._limiter: anyio.CapacityLimiter | None = None

    @property
    def summary(self) -> str:
        """What there is to see."""
        raise NotImplementedError

    def routes(self) -> list[Route]:
        """What the page may ask for."""
        raise NotImplementedError

    def study(self) -> None:
        """What is found out while nobody asks."""

    def close(self) -> None:
        """Ends the studying."""
        self._closed.set()

    async def compute(self, work: Callable[[], _Found]) -> _Found:
        """What ``work`` returns, one after the other; turned away if too many wait."""
        if self._waiting >= _MOST_WAITING:
            raise HTTPException(503, "many requests at once: try again in a moment")
        self._limiter = self._limiter or anyio.CapacityLimiter(1)
        self._waiting += 1
        try:
            return await run_sync(partial(self._alone, work), limiter=self._limiter)
        finally:
            self._waiting -= 1

    def _alone(self, work: Callable[[], _Found]) -> _Found:
        self._asked = time.monotonic()
        with self._compute:
            return work()

    def application(self, token: str, *, hosts: Sequence[str] = (), framed: bool = False) -> Guard:
        """Everything behind its guard, for an ASGI server."""
        handlers: Mapping[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            UserError: _mistaken,
            HTTPException: _refused,
            TooLargeError: _too_large,
            ClientDisconnect: _gone,
            Exception: _failed,
        }
        routes = [Route("/", self._page), Route("/{file}", _static), *self.routes()]
        return Guard(
            Starlette(routes=routes, exception_handlers=handlers), token, hosts=hosts, framed=framed, limit=_limit
        )

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(_file(self.page))


class Explorer(Desk):
    """Models and pictures to explore."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        pictures: Pictures,
        *,
        card_images: int = 300,
        command: str = "",
        search: Search | None = None,
    ) -> None:
        super().__init__()
        self.subjects = {subject.name: subject for subject in subjects}
        self.pictures, self.command, self.search = pictures, command, search
        self.card_images = min(card_images, len(pictures.images))
        self._uploads: anyio.CapacityLimiter | None = None

    @property
    def summary(self) -> str:
        return self.pictures.images.summary

    def study(self) -> None:
        """Fills the cards, a picture at a time, while nobody asks for anything; returns when all is known."""
        order = [int(name) for name, _ in self.pictures.some(0, self.card_images)]
        for number in order:
            for subject in self.subjects.values():
                while time.monotonic() - self._asked < _PAUSE and not self._closed.wait(0.1):
                    pass
                if self._closed.is_set():
                    return
                with self._compute:
                    try:
                        subject.study([self.pictures.get(str(number))])
                    except UserError as problem:
                        _log.warning("the cards do without picture %d: %s", number, problem)
                        self.card_images -= 1
                        break

    def subject(self, name: object) -> Subject:
        """The model of a name."""
        if not isinstance(name, str) or name not in self.subjects:
            raise UserError(f"there is no model {str(name)[:40]!r} here: there are {', '.join(self.subjects)}")
        return self.subjects[name]

    # What is asked for, by the path that asks it

    async def setup(self, request: Request) -> Response:
        """Everything the page must know before it shows anything."""
        return JSONResponse(
            {
                "version": __version__,
                "command": self.command,
                "data": self.pictures.images.summary,
                "pictures": len(self.pictures.images),
                "largest_upload": LARGEST_UPLOAD,
                "search": None if self.search is None else self.search.subject.name,
                "models": [subject.describe() for subject in self.subjects.values()],
            }
        )

    async def gallery(self, request: Request) -> Response:
        """Some pictures of the data set."""
        start = whole_number(request.query_params.get("start", "0"), "start")
        found = self.pictures.some(start, _GALLERY)
        return JSONResponse([{"name": name, "label": label} for name, label in found])

    async def upload(self, request: Request) -> Response:
        """Keeps a picture that is sent as it is. A few are in memory at a time; the rest wait, unread."""
        self._uploads = self._uploads or anyio.CapacityLimiter(_UPLOADS_AT_ONCE)
        async with self._uploads:
            data = await request.body()
            return JSONResponse({"name": await self.compute(partial(self.pictures.take, data))})

    async def thumbnail(self, request: Request) -> Response:
        """A small picture."""

        def draw() -> bytes:
            image = self.pictures.get(request.path_params["name"]).image_3HW
            picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
            picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
            return _encoded(picture, "JPEG")

        return Response(await self.compute(draw), media_type="image/jpeg", headers=_lasting())

    async def picture(self, request: Request) -> Response:
        """A picture as a model sees it, every pixel as it is."""
        subject = self.subject(request.query_params.get("model"))

        def draw() -> bytes:
            return _encoded(subject.drawn(self.pictures.get(request.path_params["name"])), "PNG")

        return Response(await self.compute(draw), media_type="image/png", headers=_lasting())

    async def look(self, request: Request) -> Response:
        """What a model does with a picture."""
        asked = await object_of(request)
        subject, change = self.subject(asked.get("model")), change_of(asked)

        def run() -> dict[str, Any]:
            return subject.told(subject.look(self.pictures.get(str(asked.get("picture"))), change))

        return JSONResponse(await self.compute(run))

    async def attention(self, request: Request) -> Response:
        """Where one token looked, before every layer."""
        asked = await object_of(request)
        subject, change, token = (
            self.subject(asked.get("model")),
            change_of(asked),
            whole_number(asked.get("token"), "token"),
        )

        def run() -> list[list[float] | None]:
            seen = subject.look(self.pictures.get(str(asked.get("picture"))), change, attention=True)
            if any(token >= len(layer.weight_TE) for layer in seen.layers.values()):
                raise UserError(f"there is no token {token}")
            return [None if own.alpha_TT is None else own.alpha_TT[token].tolist() for own in seen.layers.values()]

        return JSONResponse(await self.compute(run))

    async def card(self, request: Request) -> Response:
        """An expert's card, as markup."""
        subject = self.subject(request.query_params.get("model"))
        number, expert = (whole_number(request.query_params.get(name, ""), name) for name in ("layer", "expert"))
        layers = subject.describe()["layers"]
        if number >= len(layers) or expert >= layers[number]["experts"]:
            raise UserError("there is no such expert")
        if not subject.cards.num_images:
            return JSONResponse({"images": 0, "of": self.card_images, "card": ""})
        title = f"{layers[number]['name']}, expert {expert}"

        def make() -> Card:
            layer = layers[number]["id"]
            knows = self.search is not None and self.search.subject is subject
            words = self.search.words(subject.cards, layer, expert) if knows and self.search is not None else ()
            return subject.cards.card(layer, expert, words)

        card = await self.compute(make)
        return JSONResponse({"images": card.num_images, "of": self.card_images, "card": card_markup(card, title)})

    async def find(self, request: Request) -> Response:
        """Pictures of the index that are nearest to words."""
        if self.search is None:
            raise UserError("there is no index to search: ermoe explore INDEX")
        query = request.query_params.get("q", "")[:_LONGEST_QUERY]
        return JSONResponse(await self.compute(partial(self.search.find, query, self.pictures)))

    def routes(self) -> list[Route]:
        return [
            Route("/api/setup", self.setup),
            Route("/api/gallery", self.gallery),
            Route("/api/upload", self.upload, methods=["POST"]),
            Route("/api/thumbnail/{name}", self.thumbnail),
            Route("/api/picture/{name}", self.picture),
            Route("/api/look", self.look, methods=["POST"]),
            Route("/api/attention", self.attention, methods=["POST"]),
            Route("/api/card", self.card),
            Route("/api/find", self.find),
        ]


def change_of(asked: Mapping[str, Any]) -> Change:
    """What a page wants to be different.

    >>> change_of({"T": 0.25, "k": None, "offsets": {"blocks.1.mlp": [0, 0.5]}})
    Change(threshold=0.25, top_k=None, offsets={'blocks.1.mlp': (0.0, 0.5)})
    """
    threshold, top_k, offsets = asked.get("T"), asked.get("k"), asked.get("offsets") or {}
    if not isinstance(offsets, dict) or not all(isinstance(own, list) for own in offsets.values()):
        raise UserError("offsets: need numbers for each layer")
    return Change(
        None if threshold is None else _number(threshold, "T"),
        None if top_k is None else whole_number(top_k, "k"),
        {str(name): tuple(_number(value, "offsets") for value in own) for name, own in offsets.items()},
    )


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{name}: need a number")
    return float(value)


def whole_number(value: object, name: str) -> int:
    """A number from 0 on, however it was written."""
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UserError(f"{name}: need a whole number")
    return int(text)


async def object_of(request: Request) -> dict[str, Any]:
    """What a page asks with."""
    try:
        asked = await request.json()
    except (ValueError, RecursionError):
        raise UserError("the question is no JSON") from None
    if not isinstance(asked, dict):
        raise UserError("the question is no JSON object")
    return asked


def _limit(path: str) -> int:
    return LARGEST_UPLOAD if path == "/api/upload" else _LARGEST_QUESTION


def _encoded(picture: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def _lasting() -> dict[str, str]:
    """A picture of a name stays what it is as long as the address is good."""
    return {"cache-control": "private, max-age=3600"}


async def _static(request: Request) -> Response:
    name = request.path_params["file"]
    if name not in _STATIC:
        raise HTTPException(404, "there is nothing here")
    return Response(_file(name), media_type=_STATIC[name])


def _file(name: str) -> str:
    return files("ermoe.explorer").joinpath(name).read_text(encoding="utf-8")


async def _mistaken(request: Request, problem: Exception) -> Response:
    return JSONResponse({"error": str(problem)}, 400)


async def _gone(request: Request, problem: Exception) -> Response:
    return Response(status_code=400)  # to nobody: the browser has left in the middle of its question


async def _refused(request: Request, problem: Any) -> Response:
    return JSONResponse({"error": problem.detail}, problem.status_code)


async def _too_large(request: Request, problem: Any) -> Response:
    return too_large(problem.limit)


async def _failed(request: Request, problem: Exception) -> Response:
    return JSONResponse({"error": "something went wrong here; the terminal says more"}, 500)
