"""Two hosts on one machine: network namespaces with addresses of their own, joined by one cable."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.children import environment

SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "torchrun_hosts.sh"


def lacking():
    """Why there can be no such hosts here; empty if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "needs ip, of iproute2"
    tried = subprocess.run(["ip", "netns", "add", f"try-{os.getpid()}"], capture_output=True, text=True)
    if tried.returncode:
        return f"needs network namespaces: {tried.stderr.strip()}"
    _ip("netns", "delete", f"try-{os.getpid()}")
    return ""


@dataclass(frozen=True)
class Host:
    """A namespace, which is also the name of its end of the cable, and its address."""

    name: str
    address: str

    def start(self, log, *command, **variables):
        """The script of examples/cluster with a command of ermoe, its words appended to ``log``."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        settings = environment(PATH=path, PROCESSES="1", ADDRESS=self.address, **variables)
        with open(log, "ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, str(SCRIPT), *map(str, command)],
                stdout=file, stderr=file, env=settings,
            )  # fmt: skip

    def cut_off(self):
        """Pulls the cable."""
        _ip("-n", self.name, "link", "set", self.name, "down")

    def reconnect(self):
        _ip("-n", self.name, "link", "set", self.name, "up")

    def bytes_sent(self):
        shown = _ip("netns", "exec", self.name, "cat", f"/sys/class/net/{self.name}/statistics/tx_bytes")
        return int(shown)

    def kill(self):
        """Ends all its processes at once, as a host does that loses its power."""
        while pids := _ip("netns", "pids", self.name).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_hosts():
    """Both, until the block ends, and with it all their processes."""
    first, second = (Host(f"h{os.getpid()}{end}", f"10.77.0.{number}") for number, end in ((1, "a"), (2, "b")))
    with ExitStack() as ends:
        for host in (first, second):
            _ip("netns", "add", host.name)
            ends.callback(_ip, "netns", "delete", host.name)
        _ip("link", "add", first.name, "netns", first.name, "type", "veth", "peer", second.name, "netns", second.name)
        for host in (first, second):
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.reconnect()
            ends.callback(host.kill)
        yield first, second


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
