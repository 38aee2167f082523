"""Runs that are killed, refused, or lose their disk."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from ermoe.errors import UserError
from ermoe.train import checkpoint
from ermoe.train.run_folder import append_line, differences, forget_lines_after, read_lines
from support.children import environment
from support.disk import limited_files
from support.tiny_run import SPARSITY, StoppedError, recipe, run

TESTS = Path(__file__).parents[2]


def flat(state, prefix=""):
    """Every leaf of a checkpoint by its path."""
    if isinstance(state, dict):
        return {k: v for name, part in state.items() for k, v in flat(part, f"{prefix}/{name}").items()}
    if isinstance(state, list | tuple):
        return {k: v for number, part in enumerate(state) for k, v in flat(part, f"{prefix}/{number}").items()}
    return {prefix: state}


def assert_bit_identical(found, expected):
    assert (found / "metrics.jsonl").read_text() == (expected / "metrics.jsonl").read_text()
    for name in ("model", "checkpoints/best"):
        weights, others = (load_file(place / name / "model.safetensors") for place in (found, expected))
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[key], others[key]) for key in others)
    state, other = (flat(checkpoint.read(place / "checkpoints" / "last.pt")) for place in (found, expected))
    assert state.keys() == other.keys()
    for key, value in other.items():
        same = torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
        assert same, key


def test_a_run_killed_at_random_moments_ends_bit_identical(tmp_path):
    kills = 4
    script = str(TESTS / "support" / "kill.py")
    done = subprocess.run(
        [sys.executable, script, str(kills), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert not list((tmp_path / "disturbed").rglob(".*")), "what was being written when a life ended is removed"
    assert_bit_identical(tmp_path / "disturbed", tmp_path / "undisturbed")


@pytest.mark.no_cover
@pytest.mark.parametrize("where", [(0, 2), (0, 11), (1, 0), (1, 6)])
def test_a_run_stopped_before_a_step_ends_bit_identical(tmp_path, whole, where):
    def stop(epoch, step):
        if (epoch, step) == where:
            raise StoppedError

    folder = tmp_path / "run"
    with pytest.raises(StoppedError):
        run(folder, recipe(save_every=5, validation=0.04), before=stop)
    run(folder, recipe(save_every=5, validation=0.04))
    assert_bit_identical(folder, whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, recipe(save_every=5, validation=0.04))
    return folder


def test_a_finished_run_is_not_run_again(whole):
    before = (whole / "metrics.jsonl").read_text()
    run(whole, recipe(save_every=5, validation=0.04), before=lambda *_: pytest.fail("a step was taken"))
    assert (whole / "metrics.jsonl").read_text() == before


def test_another_configuration_is_refused_with_the_difference(whole):
    with pytest.raises(UserError, match=r"training\.base_lr: 0\.05 there, 0\.01 asked for"):
        run(whole, recipe(save_every=5, validation=0.04, base_lr=0.01))


def test_resume_never_and_must(whole, tmp_path):
    with pytest.raises(UserError, match="holds a run already"):
        run(whole, recipe(save_every=5, validation=0.04), resume="never")
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        run(tmp_path / "new", recipe(), resume="must")
    with pytest.raises(UserError, match="use one of"):
        run(tmp_path / "new", recipe(), resume="perhaps")


def test_a_damaged_config_or_checkpoint_is_named(whole, tmp_path):
    for name, content in (("config.json", "{"), ("checkpoints/last.pt", "no checkpoint")):
        folder = tmp_path / name.replace("/", "-")
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.json").write_text((whole / "config.json").read_text())
        (folder / name).write_text(content)
        with pytest.raises(UserError, match="damaged"):
            run(folder, recipe(save_every=5, validation=0.04))


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"format": 1, "model": Evil()}, tmp_path / "last.pt")
    with pytest.raises(UserError, match="damaged or no checkpoint"):
        checkpoint.read(tmp_path / "last.pt")
    assert not (tmp_path / "evil").exists()


@pytest.fixture
def allow():
    with limited_files() as allow:
        yield allow


def test_a_run_outlives_a_full_disk_wherever_it_strikes(tmp_path, whole, allow):
    folder, quiet = tmp_path / "run", Console(quiet=True)
    metrics, last = folder / "metrics.jsonl", folder / "checkpoints" / "last.pt"

    def live(what, then, *, at, limit):
        def fill(epoch, step):
            if (epoch, step) == at:
                allow(limit())

        with pytest.raises(UserError, match=rf"{what} cannot be written: File too large; .* {then}"):
            run(folder, recipe(save_every=5, validation=0.04), before=fill, console=quiet)
        allow()

    live("metrics.jsonl", "no checkpoint yet", at=(0, 2), limit=lambda: metrics.stat().st_size + 10)
    live("metrics.jsonl", "which is intact", at=(0, 7), limit=lambda: metrics.stat().st_size + 10)
    assert read_lines(metrics)[-1]["step"] == 7
    allow(10)  # full already when it starts again, and there are lines to forget
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be written"):
        run(folder, recipe(save_every=5, validation=0.04), console=quiet)
    allow()
    live("last.pt", "which is intact", at=(0, 9), limit=lambda: last.stat().st_size // 2)
    assert not list(folder.rglob(".*"))
    run(folder, recipe(save_every=5, validation=0.04), console=quiet)
    assert_bit_identical(folder, whole)


@pytest.mark.parametrize("reason", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, reason):
    def refuse(*args, **options):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(UserError, match=f"{os.strerror(reason)}.*choose another"):
        run(tmp_path / "run", recipe())


def test_a_run_folder_below_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory; choose another place"):
        run(tmp_path / "file" / "run", recipe())


def test_lines_written_after_the_checkpoint_are_forgotten_with_a_half_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_line(path, {"step": step})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    forget_lines_after(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for torn in (b'{"step": 2, "nam', '{"name": "α'.encode()[:-1], b'{"step"\n', b"\0\0\0\n"):
        path.write_bytes(b'{"step": 1}\n' + torn)
        assert read_lines(path) == [{"step": 1}]
    path.write_bytes(b'{"step": 1}\n{"st{"step": 3}\n{"step": 4}\n')
    with pytest.raises(UserError, match="damaged in line 2"):
        read_lines(path)


def test_what_a_killed_run_was_writing_is_removed(tmp_path, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for place in (folder, folder / "checkpoints", folder / "checkpoints" / "best", folder / "model"):
        (place / f".last.{'0' * 32}.pt").touch()
    run(folder, recipe(save_every=5, validation=0.04))
    assert not list(folder.rglob(".*"))


def test_how_often_a_run_saves_and_where_its_data_lie_may_change(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    run(
        folder,
        recipe(save_every=3, validation=0.04, keep_every=1, log_every=2),
        before=lambda *_: pytest.fail("a step was taken"),
    )
    then, now = {"data": "/old/set", "weights": "/old/b16.pth"}, {"data": "/new/set", "weights": "/new/b16.pth"}
    assert differences(then, now) == []
    assert differences({"data": {"path": "/old", "age": "Age"}}, {"data": {"path": "/new", "age": "years"}}) == [
        "data.age: Age there, years asked for"
    ]
    assert differences(then, now | {"weights": "/new/l16.pth"}) != []


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    with pytest.raises(UserError, match=r"the loss is nan at step \d+: start a new run folder"):
        run(tmp_path / "run", recipe(base_lr=1e30, clip=0, ema=0.0))


@pytest.mark.parametrize("every", [{}, {"save_every": 5}, {"retract_every": 5}], ids=["epochs", "saves", "retracts"])
@pytest.mark.parametrize("sparsity", [SPARSITY, None])
def test_weights_that_are_no_numbers_are_neither_retracted_nor_saved(tmp_path, sparsity, every):
    chosen = recipe(sparsity, base_lr=1e30, clip=0, ema=0.0, log_every=1000, **{"retract_every": 0, **every})
    with pytest.raises(UserError, match=r"no longer finite numbers after step \d+: start a new run folder"):
        run(tmp_path / "run", chosen)
    assert not (tmp_path / "run" / "checkpoints").exists()
