"""A file is replaced as a whole or not at all."""

import errno
import gzip
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ermoe.errors import UserError
from ermoe.files import UnwritableError, append, read_bytes, read_start, read_text, remove_drafts, replacing
from support.disk import limited_files


@pytest.fixture
def allow():
    with limited_files() as allow:
        yield allow


def test_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "a.txt"
    for text in ("first", "second"):
        with replacing(path) as draft:
            draft.write_text(text)
        assert path.read_text() == text
    assert os.listdir(path.parent) == ["a.txt"]


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as draft:
        draft.write_text("half of the n")
        assert path.read_text() == "old"
        draft.write_text("new")
    assert path.read_text() == "new"


def test_a_failure_keeps_the_old_file(tmp_path):
    def fail(path):
        with replacing(path) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        fail(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_places_where_no_file_can_be(tmp_path):
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path, "is a folder"), (tmp_path / "file" / "a.txt", "cannot be a folder")):
        with pytest.raises(UserError, match=reason), replacing(place) as draft:
            draft.touch()


def test_drafts_keep_the_suffix_and_files_the_usual_permissions(tmp_path):
    usual = tmp_path / "usual"
    usual.touch()
    with replacing(tmp_path / "a.png") as draft:
        assert draft.suffix == ".png"
        draft.touch()
    assert (tmp_path / "a.png").stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EROFS, "make it writable")],
)
def test_what_the_disk_refuses_is_said_even_if_cleaning_up_fails_too(tmp_path, monkeypatch, reason, remedy):
    def refuse(path, *args, **options):
        raise OSError(reason, os.strerror(reason), str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UnwritableError, match=f"{os.strerror(reason)}; {remedy}"), replacing(tmp_path / "a") as draft:
        draft.write_text("text")


def test_a_mistake_about_another_file_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "a") as draft:
        draft.write_text(Path(tmp_path, "missing").read_text())
    with pytest.raises(RuntimeError, match="no disk"), replacing(tmp_path / "a"):
        raise RuntimeError("no disk is to blame for this")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("writer", [torch.save, save_file])
def test_libraries_with_errors_of_their_own_do_not_hide_a_full_disk(tmp_path, allow, writer):
    allow(4096)
    with pytest.raises(UnwritableError, match="File too large"), replacing(tmp_path / "a") as draft:
        writer({"value": torch.zeros(10_000)}, draft)
    assert os.listdir(tmp_path) == []


def test_what_is_appended_is_there_as_a_whole_or_not_at_all(tmp_path, allow):
    path = tmp_path / "lines"
    append(path, b"first\n")
    allow(10)  # the disk takes four bytes of what follows
    with pytest.raises(UnwritableError, match="lines cannot be written: File too large"):
        append(path, b"second\n")
    assert path.read_bytes() == b"first\n"


def test_drafts_of_killed_processes_are_removed_and_nothing_else(tmp_path):
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a.pt") as draft:
        raise KeyboardInterrupt
    draft.write_text("left by a kill")
    for name in (".hidden", ".config.d41d8cd9.json", "a.pt"):
        (tmp_path / name).touch()
    remove_drafts(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".config.d41d8cd9.json", ".hidden", "a.pt"]


def test_what_may_never_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name, kind in (("pipe.txt", "a pipe"), ("zero.txt", "a device"), ("", "a folder")):
        with pytest.raises(UserError, match=f"is {kind}, not a file: copy it"):
            read_bytes(tmp_path / name, "copy it")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_no_more_is_read_than_a_limit_allows(tmp_path, name):
    text = b"12345" * 100
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert read_bytes(tmp_path / name, limit=500) == text
    assert read_start(tmp_path / name, 3) == b"123"
    (tmp_path / "zeros.gz").write_bytes(gzip.compress(bytes(10_000)))  # which take 50 bytes
    for place, limit in ((tmp_path / name, 499), (tmp_path / "zeros.gz", 9_999)):
        with pytest.raises(UserError, match="is too large: it holds more than"):
            read_bytes(place, limit=limit)


def test_text_in_another_encoding_is_named(tmp_path):
    for encoding, asked in (("utf-16", "utf-16"), ("utf-16-le", "utf-16"), ("latin1", "latin1")):
        (tmp_path / "a.txt").write_bytes("café".encode(encoding))
        with pytest.raises(UserError, match=f"is not UTF-8 text: byte .* iconv -f {asked} -t utf-8"):
            read_text(tmp_path / "a.txt")
