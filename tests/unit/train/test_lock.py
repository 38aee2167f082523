"""One process at a time: a lock ends with whoever holds it, and no folder or file is left of it."""

import errno
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from ermoe.errors import UserError
from ermoe.studies.record import Job, run_queue
from ermoe.train import lock
from ermoe.train.compute import Processes
from ermoe.train.lock import locked
from ermoe.train.run_folder import RunFolder
from support.children import environment

_HOLDER = """
import sys
from pathlib import Path
from ermoe.train.lock import locked
with locked(Path(sys.argv[1]), Path("the run")):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(path):
    """Holds the lock until the block ends."""
    command = [sys.executable, "-c", _HOLDER, str(path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert holder.stdout.readline() == "held\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def test_another_process_is_refused_until_the_first_is_dead(tmp_path):
    run = RunFolder(tmp_path / "run")
    path = run.folder / ".lock"
    with another_process(path) as holder:
        sentence = rf"run is in use by another run \(process {holder.pid} on .*\): wait"
        with pytest.raises(UserError, match=sentence), run.locked(Processes()):
            pytest.fail("it was let in")
        assert path.is_file(), "the one who was refused left the lock alone"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with run.locked(Processes()):  # what a dead process left does not matter
            assert path.read_text().startswith(f"process {os.getpid()} ")
    assert os.listdir(run.folder) == []


def test_an_earlier_life_of_the_same_job_is_waited_for_and_no_other(tmp_path, monkeypatch, caplog):
    run = RunFolder(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "seven")
    with another_process(run.folder / ".lock") as holder:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        monkeypatch.setattr(lock, "_PATIENCE", 0.5)
        with (
            pytest.raises(UserError, match=r"in use by another run \(process .*, job seven\)"),
            run.locked(Processes()),
        ):
            pytest.fail("it was let in")
        assert f"waiting for an earlier life, process {holder.pid}" in caplog.text
        monkeypatch.setattr(lock, "_PATIENCE", 60.0)
        threading.Timer(0.5, holder.kill).start()
        with run.locked(Processes()):
            assert holder.wait() == -signal.SIGKILL
    with another_process(run.folder / ".lock"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "eight")
        with pytest.raises(UserError, match="in use by another run"), run.locked(Processes()):
            pytest.fail("it was let in")


def test_a_run_may_ask_again_and_nothing_is_left_of_a_folder_that_stayed_empty(tmp_path):
    folder = tmp_path / "runs" / "a"
    with RunFolder(folder).locked(Processes()), RunFolder(folder).locked(Processes()):
        assert (folder / ".lock").is_file()
    assert os.listdir(tmp_path) == []


def test_another_thread_is_refused(tmp_path):
    refused = []

    def enter():
        try:
            with locked(tmp_path / ".lock", tmp_path):
                pass
        except UserError as problem:
            refused.append(str(problem))

    with locked(tmp_path / ".lock", tmp_path):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(refused) == 1


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    with locked(tmp_path / ".lock", tmp_path):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        with locked(tmp_path / ".lock", tmp_path):  # the child is still there
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_queue_is_alone_with_its_file(tmp_path):
    def queue():
        return run_queue("s", [Job("a", 1, lambda: {"x": 1})], tmp_path / "records.jsonl")

    with another_process(tmp_path / ".records.jsonl.lock"), pytest.raises(UserError, match="is in use by another run"):
        queue()
    assert not (tmp_path / "records.jsonl").exists()
    assert len(queue()) == 1
    assert os.listdir(tmp_path) == ["records.jsonl"]


def test_without_locks_a_sentence_warns_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with locked(tmp_path / ".lock", tmp_path):
        assert "there are no locks on this system" in caplog.text
    monkeypatch.setattr(lock, "fcntl", None)
    with locked(tmp_path / ".lock", tmp_path):
        pass
    assert len(caplog.records) == 2


def test_a_place_where_no_folder_can_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be a folder"), RunFolder(tmp_path / "file" / "run").locked(Processes()):
        pass


@pytest.mark.parametrize("command", ["image train digits-dense", "retrieve train tiny-dense", "brain train tiny-ermoe"])
def test_the_second_training_in_a_folder_ends_before_it_reads_anything(command, tmp_path, capsys):
    from ermoe.cli.main import main

    folder = tmp_path / "run"
    with another_process(folder / ".lock"):
        assert main([*command.split(), str(tmp_path / "nowhere"), "--out", str(folder), "--device", "cpu"]) == 2
        assert "run is in use by another run" in capsys.readouterr().err
        assert os.listdir(folder) == [".lock"]
