"""The explorer at an address: from a terminal until Ctrl-C, or beside a notebook in a thread of its own."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ermoe.errors import UserError, library

if TYPE_CHECKING:
    from ermoe.explorer.server import Explorer

_PURPOSE = "the explorer is a small web server"
_QUEUE = 2048


class Served:
    """An explorer that answers at ``url``, until it is closed."""

    def __init__(self, explorer: Explorer, *, host: str = "127.0.0.1", port: int = 0, framed: bool = False) -> None:
        uvicorn: Any = library("uvicorn", _PURPOSE, "explore")
        self.explorer = explorer
        self._socket = listening(host, port)
        port = self._socket.getsockname()[1]
        token = secrets.token_urlsafe(16)
        shown = _shown(host)
        self.url = f"http://{shown}:{port}/{token}/"
        app = explorer.application(token, hosts=_hosts(host, port), framed=framed)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # clients that go away are nobody's problem
        settings: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "ws": "none"}
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", timeout_keep_alive=30, **settings))
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        """Answers until Ctrl-C."""
        self._study()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                self._server.run(sockets=[self._socket])
        finally:
            self.explorer.close()

    def start(self) -> None:
        """Answers in a thread, from now on."""
        self._server.install_signal_handlers = lambda: None
        thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._study()
        end = time.monotonic() + 30
        while not self._server.started and thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> None:
        """Answers no more."""
        self.explorer.close()
        self._server.should_exit = True
        for thread in self._threads:
            thread.join(10)

    def _study(self) -> None:
        thread = threading.Thread(target=self.explorer.study, daemon=True)
        thread.start()
        self._threads.append(thread)


def listening(host: str, port: int) -> socket.socket:
    """A socket at the address; where the port is taken, at another one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        own = socket.socket(family, socket.SOCK_STREAM)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(address)
        except OSError:
            if port == 0:
                raise
            own.close()
            return listening(host, 0)
        own.listen(_QUEUE)  # from now on a browser may knock, and waits until it is let in
    except OSError as problem:
        raise UserError(f"--host {host}: {problem.strerror or problem}; use 127.0.0.1 or an address of yours") from None
    return own


def _is_everywhere(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def _shown(host: str) -> str:
    name = socket.gethostname() if _is_everywhere(host) else host
    return f"[{name}]" if ":" in name else name


def _hosts(host: str, port: int) -> Sequence[str]:
    """What a browser may call us: nothing is excluded if we answer everywhere, where we go by names we do not know."""
    if _is_everywhere(host):
        return ()
    return [f"{name}:{port}".lower() for name in {_shown(host), "127.0.0.1", "localhost", "[::1]"}]
