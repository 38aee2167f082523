"""A file is replaced as a whole or not at all."""

import os

import pytest

from ermoe.errors import UserError
from ermoe.files import replacing


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
