"""What is read from a shard is kept, shared by the processes of a run, and made again when it no longer holds."""

import os
import tarfile
from pathlib import Path

import pytest

from ermoe.data import shard_index, shards
from ermoe.data.images import open_images
from ermoe.data.shard_index import each, kept
from ermoe.errors import UserError
from support import pictures as make


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Names of the shards whose headers are read, in an empty cache that keeps every shard."""
    monkeypatch.setenv("ERMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_index, "_WORTH_KEEPING", 1)
    names, tar_open = [], tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda file, *rest: names.append(Path(file).name) or tar_open(file, *rest))
    return names


def labels(folder):
    """As another process would read them."""
    shards._index.cache_clear()
    return open_images(folder).label_N.tolist()


def test_the_next_process_reads_no_header(tmp_path, opened):
    folder = make.shards(tmp_path / "data")
    opened.clear()
    first = labels(folder)
    assert sorted(opened) == ["train-000.tar", "train-001.tar"]
    opened.clear()
    assert labels(folder) == first
    assert opened == []
    make.shard(folder / "train-001.tar", range(6, 15))
    opened.clear()
    assert labels(folder) == [i % 3 for i in range(15)]
    assert opened == ["train-001.tar"], "the one that changed"


@pytest.mark.parametrize(
    "damage", [b"", b"2\n", b"not json\n", b'6\n["a", 1, 2]\n', b"[" * 10**5, b"1\n[1, 2, 3, 4]\n"]
)
def test_a_damaged_index_is_made_again(tmp_path, opened, damage):
    folder = make.shards(tmp_path / "data")
    first = labels(folder)
    for file in (tmp_path / "cache" / "shards").iterdir():
        file.write_bytes(damage)
    assert labels(folder) == first
    opened.clear()
    assert labels(folder) == first
    assert opened == []


def test_bytes_and_names_of_all_kinds_come_back(tmp_path, opened):
    rows = [["a\udcff/\n", 1, 2, bytes(range(256)).decode("latin-1")]]
    make.shards(tmp_path)
    found = [kept(tmp_path / "train-000.tar", "odd", lambda: rows, (str, int, int, str)) for _ in range(2)]
    assert found == [rows, rows]


def test_without_a_place_for_caches_shards_are_read_each_time(tmp_path, opened, monkeypatch):
    folder = make.shards(tmp_path / "data")
    (tmp_path / "file").touch()
    monkeypatch.setenv("ERMOE_CACHE", str(tmp_path / "file"))
    opened.clear()
    assert labels(folder) == labels(folder)
    assert len(opened) == 4


def test_a_shard_that_cannot_be_read_is_named(tmp_path, opened):
    folder = make.shards(tmp_path / "data")
    labels(folder)
    os.truncate(folder / "train-001.tar", 700)
    with pytest.raises(UserError, match=r"train-001\.tar"):
        labels(folder)


def test_processes_begin_at_different_shards(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, expected in enumerate(([0, 1, 2, 3, 4], [1, 2, 3, 4, 0], [3, 4, 0, 1, 2])):
        visited = []
        monkeypatch.setenv("RANK", str(rank))
        assert each(range(5), lambda number, seen=visited: seen.append(number) or -number) == [0, -1, -2, -3, -4]
        assert visited == expected
