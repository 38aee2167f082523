"""Run folders that the hosts of a run share, or do not."""

import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from ermoe.errors import UserError
from ermoe.train.run_folder import RunFolder
from ermoe.train.shared import check_shared


def not_shared(group):
    """Each process has a folder of its own, in which the second one finds nothing, or a file of another size."""
    with tempfile.TemporaryDirectory() as own:
        files = [Path(own, "config.json"), Path(own, "checkpoints", "last.pt")]
        if group.is_main:
            files[0].touch()
        with pytest.raises(UserError, match=r"does not see the config\.json in .* storage that all hosts share"):
            check_shared(Path(own), files, group, patience=0)
        files[0].write_text("a" * (1 + group.rank))
        with pytest.raises(UserError, match="storage that all hosts share"):
            check_shared(Path(own), files, group, patience=0)


def other_data(group):
    """A host's copy of the data has fewer images; the first process never hears of it but by the end of the other."""
    places = [tempfile.mkdtemp()]
    dist.broadcast_object_list(places)
    run = RunFolder(Path(places[0]))
    if group.is_main:
        assert not run.open({"num_images": 10}, "auto", group)
    else:
        with pytest.raises(UserError, match="num_images: 10 there, 9 asked for"):
            run.open({"num_images": 9}, "auto", group)
