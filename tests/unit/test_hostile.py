"""Inputs that were made to harm end in one sentence: nothing hangs, fills the memory, runs or writes elsewhere."""

from pathlib import Path

import pytest

from ermoe.cli.main import main
from support import saves
from support.hostile import INPUTS

PROGRAMS = ("gs", "gswin64c", "convert", "magick", "ffmpeg", "git", "sh", "curl", "wget", "tar", "gunzip", "touch")
GIGABYTE_IN_KB = 2**20


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    for package in ("nibabel", "open_clip"):
        pytest.importorskip(package)
    import matplotlib.font_manager  # noqa: F401 (it keeps a list of fonts at home)

    folder = tmp_path_factory.mktemp("saved")
    saves.classifier(folder / "classifier")
    saves.clip(folder / "clip")
    saves.brain_age(folder / "brain")
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder for the input beside a home, a current folder, and programs that only note that they were started."""
    for name in ("given", "home", "here", "programs"):
        (tmp_path / name).mkdir()
    for name in PROGRAMS:
        program = tmp_path / "programs" / name
        program.write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/started\n")
        program.chmod(0o755)
    monkeypatch.chdir(tmp_path / "here")
    for name, value in (("HOME", "home"), ("XDG_CACHE_HOME", "home"), ("ERMOE_CACHE", "home"), ("PATH", "programs")):
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def peak_kb():
    """The most memory that this process has had since it was last asked."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", INPUTS)
def test_ends_in_one_sentence(name, saved, place, capsys):
    argv = INPUTS[name](saved, place / "given")
    before = {path for path in place.rglob("*") if place / "given" not in path.parents}
    peak_kb()
    usual = peak_kb()
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert peak_kb() - usual < GIGABYTE_IN_KB
    assert shown.err.startswith("ermoe: ")
    assert shown.err.count("\n") == 1
    assert len(shown.err) < 2000
    assert not {"\x1b", "\x07", "\u202e"} & set(shown.out + shown.err)
    assert "Traceback" not in shown.out
    assert {path for path in place.rglob("*") if place / "given" not in path.parents} == before, "something was written"
