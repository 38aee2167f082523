"""A run on two hosts, which are cut off, killed and started again, ends as if nothing had happened.

It learns from shards that every process has for itself, and every disturbance comes in the middle of an epoch.
"""

import time

import pytest
from safetensors.torch import load_file

from support import pictures as make
from support.hosts import lacking, two_hosts

pytestmark = pytest.mark.timeout(900)
SETTINGS = "--epochs 3 --batch-size 16 --warmup-epochs 0.5 --save-every 4 --log-every 1 --workers 0 --device cpu"
STEPS = 3 * (20 + 1)  # and a line for every evaluation


@pytest.fixture(scope="module")
def hosts():
    if reason := lacking():
        pytest.skip(reason)
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make.uneven_shards(tmp_path_factory.mktemp("shards"), [70, 0, 41, 150, 3, 56])


class Run:
    """A run folder, and how both hosts work on it."""

    def __init__(self, hosts, shards, folder):
        self.hosts = hosts
        self.folder = folder
        settings = [*SETTINGS.split(), "--validation", "0", "--shuffle", "shards"]
        self.command = [hosts[0].address, "image", "train", "digits-ermoe", shards, "--out", folder / "run", *settings]
        self.started = {}

    def start(self, host):
        self.started[host] = host.start(self.folder / f"{host.address}.log", *self.command)

    def wait_for(self, lines):
        """Until the run has written so many lines."""
        while self.lines() < lines:
            assert all(script.poll() is None for script in self.started.values()), self.said()
            time.sleep(0.02)

    def lines(self):
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def said(self):
        return "\n".join(f"{path.stem}: {path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def end(self):
        """What is left of the run, bit by bit: its figures, and its weights."""
        for script in self.started.values():
            assert script.wait() == 0, self.said()
        weights = load_file(self.folder / "run" / "model" / "model.safetensors")
        figures = (self.folder / "run" / "metrics.jsonl").read_bytes()
        return figures, {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


@pytest.fixture
def run(hosts, shards, tmp_path):
    own = Run(hosts, shards, tmp_path)
    for host in hosts:
        own.start(host)
    yield own
    for host in hosts:
        host.kill()


@pytest.fixture(scope="module")
def undisturbed(hosts, shards, tmp_path_factory):
    own = Run(hosts, shards, tmp_path_factory.mktemp("undisturbed"))
    before = [host.bytes_sent() for host in hosts]
    for host in hosts:
        own.start(host)
    figures, weights = own.end()
    sent = [host.bytes_sent() - bytes_before for host, bytes_before in zip(hosts, before, strict=True)]
    assert figures.count(b"\n") == STEPS
    assert min(sent) > 60 * 0.8 * sum(map(len, weights.values())), "both sent gradients in every step"
    return figures, weights


def test_a_host_that_is_cut_off_for_twenty_seconds_comes_back(run, hosts, undisturbed):
    run.wait_for(26)
    hosts[1].cut_off()
    time.sleep(1)
    reached = run.lines()
    time.sleep(19)
    assert run.lines() == reached < STEPS, "it waits for the host"
    hosts[1].reconnect()
    assert run.end() == undisturbed


@pytest.mark.parametrize("lost", [0, 1], ids=["the host where all meet", "the other host"])
def test_a_host_that_is_killed_and_started_again_goes_on(run, hosts, undisturbed, lost):
    run.wait_for(26)
    hosts[lost].kill()
    run.started.pop(hosts[lost]).wait()
    time.sleep(2)
    assert run.lines() < STEPS
    run.start(hosts[lost])
    assert run.end() == undisturbed
