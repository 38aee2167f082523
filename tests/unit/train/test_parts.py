"""Checkpoints in parts, written and read by one process; several do it in tests/training/test_two_processes.py."""

import errno
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ermoe.files import UnwritableError
from ermoe.train import parts


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "nothing": torch.zeros(0, 3),
        "weight": torch.randn(4, 5, generator=generator),
        "turned": torch.randn(5, 4, generator=generator).mT,
        "step": torch.tensor(7.0),
        "count": torch.arange(3),
    }


@pytest.mark.parametrize(("largest_file", "num_files"), [(2**30, 1), (100, 3)])
def test_what_is_written_is_read(tensors, largest_file, num_files, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_LARGEST_FILE", largest_file)
    parts.write(tmp_path / "parts-1-0", tensors)
    assert len(list((tmp_path / "parts-1-0").iterdir())) == num_files
    assert parts.stored_names(tmp_path / "parts-1-0") == tensors.keys()
    found = {name: torch.empty_like(tensor).fill_(9) for name, tensor in tensors.items()}
    parts.read(tmp_path / "parts-1-0", found)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_written_from_where_they_are(tensors, tmp_path, monkeypatch):
    written = {}

    def watch(own, draft, **options):
        written.update({name: tensor.data_ptr() for name, tensor in own.items()})
        save_file(own, draft, **options)

    monkeypatch.setattr(parts, "save_file", watch)
    parts.write(tmp_path / "parts-1-0", tensors)
    assert written.pop("turned") != tensors.pop("turned").data_ptr()  # files hold rows one after the other
    assert written == {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_what_the_disk_refuses_gets_its_sentence(tensors, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parts, "save_file", refuse)
    with pytest.raises(UnwritableError, match="No space left on device; free some space"):
        parts.write(tmp_path / "parts-1-0", tensors)


def test_one_process_can_tell_the_others_what_the_disk_refused():
    refused = UnwritableError(Path("a.safetensors"), OSError(errno.EROFS, "Read-only file system"))
    told = pickle.loads(pickle.dumps(refused))
    assert str(told) == str(refused)
    assert (told.reason, told.remedy) == (refused.reason, refused.remedy)
