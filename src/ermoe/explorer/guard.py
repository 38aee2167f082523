"""Who may ask the explorer, and for how much: a guard in front of everything it serves.

An address must hold the token; the Host must be one the server was started for, so that no name of a stranger can lead
here; no page of another origin may ask; bodies are limited; and answers tell browsers to fetch nothing from elsewhere.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("ermoe")
_POLICY = (
    "default-src 'none'; script-src 'self'{script}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src data:; frame-src 'self'; base-uri 'none'; form-action 'none'{frames}"
)
_NO_TOKEN = "This address lacks the token: open the one that the terminal shows.\n"
_ELSEWHERE = "Pages of other origins may not ask here.\n"


class TooLargeError(Exception):
    """A body that is larger than it may be: than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


def too_large(limit: int) -> Response:
    """The answer to it."""
    problem = f"more than {limit / 2**20:g} MB were sent: scale the picture down first"
    return JSONResponse({"error": problem}, 413, {"connection": "close"})


class Guard:
    """Passes on what may be asked, without the token; answers everything else itself.

    Args:
        token: the first part of every address.
        hosts: what the Host header may be; empty for anything, as the token still guards.
        framed: whether pages of other origins, such as a notebook's, may show the explorer in a frame.
        limit: the largest body of a path, in bytes.
    """

    def __init__(
        self, app: ASGIApp, token: str, *, hosts: Iterable[str], framed: bool, limit: Callable[[str], int]
    ) -> None:
        self.app, self.token, self.hosts, self.framed, self.limit = app, token, frozenset(hosts), framed, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no websockets here, and nothing to start
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, self._armoured(send))
            return
        path = scope["path"][len(self.token) + 1 :]
        inner = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogateescape"), "root_path": ""}
        try:
            await self.app(inner, self._limited(receive, self.limit(path)), self._armoured(send))
        except Exception:  # a bug of ours: the page has had its sentence, the terminal gets the traceback
            _log.exception("the explorer failed at %s", path)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if self.hosts and host not in self.hosts:
            return PlainTextResponse("This explorer does not go by that name.\n", 403)
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            return PlainTextResponse(_ELSEWHERE, 403)
        is_shown = headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_shown:
            return PlainTextResponse(_ELSEWHERE, 403)
        first = scope["path"].split("/")[1] if "/" in scope["path"] else ""
        if not secrets.compare_digest(first.encode("utf-8", "replace"), self.token.encode()):
            return PlainTextResponse(_NO_TOKEN, 403)
        if scope["path"] == f"/{self.token}":
            return PlainTextResponse("", 307, {"location": f"/{self.token}/"})
        length, limit = headers.get("content-length", "0"), self.limit(scope["path"][len(self.token) + 1 :])
        return None if length.isdigit() and int(length) <= limit else too_large(limit)

    def _limited(self, receive: Receive, limit: int) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise TooLargeError(limit)
            return message

        return counted

    def _armoured(self, send: Send) -> Send:
        async def armoured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # nilearn's page brings its scripts within itself; it is shown in a frame that may reach nothing
                script = " 'unsafe-inline' 'unsafe-eval'" if headers.get("x-frame-page") else ""
                frames = "" if self.framed else "; frame-ancestors 'self'"
                headers["content-security-policy"] = _POLICY.format(script=script, frames=frames)
                headers["referrer-policy"] = "no-referrer"  # addresses hold the token
                headers["x-content-type-options"] = "nosniff"
                headers["cross-origin-resource-policy"] = "same-origin"
                headers.setdefault("cache-control", "no-store")
            await send(message)

        return armoured
