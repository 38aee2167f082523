"""Whoever asks is told the figures of a run: one protocol, with TensorBoard and Weights & Biases as instances."""

import json
import sys
from contextlib import suppress
from types import ModuleType

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ermoe.errors import UserError
from ermoe.train.callbacks import Callback, TensorBoard, WeightsAndBiases
from ermoe.train.compute import Compute
from ermoe.train.loop import means_among
from ermoe.train.run_folder import Log, RunFolder
from ermoe.train.settings import TrainingMachine


class Listener(Callback):
    """Remembers what it is told."""

    def __init__(self):
        self.heard = []

    def begin(self, folder, config, first_step):
        self.heard.append(("begin", folder.name, config["epochs"], first_step))

    def figures(self, step, kind, figures):
        assert figures["images_per_second"] > 0
        self.heard.append((step, kind, figures["loss"]))

    def end(self):
        self.heard.append("end")


@pytest.fixture
def log(tmp_path):
    def begin(*callbacks, first_step=0):
        run = RunFolder(tmp_path / "run")
        run.folder.mkdir(exist_ok=True)
        run.config.write_text(json.dumps({"epochs": 2}))
        console = Console(quiet=True)
        return Log(run, True, first_step, 10, batch_size=4, console=console, callbacks=callbacks)

    return begin


def test_they_hear_the_figures_and_the_end_whatever_happens(log):
    listener = Listener()
    running = log(listener, first_step=4)
    with suppress(ZeroDivisionError), running.going_on():
        running.write(5, "train", {"loss": 0.5})
        running.write(6, "test", {"loss": 0.25})
        raise ZeroDivisionError
    assert listener.heard == [("begin", "run", 2, 4), (5, "train", 0.5), (6, "test", 0.25), "end"]


def test_some_may_be_left_out(log):
    class Quiet(Callback):
        pass

    running = log(Quiet())
    with running.going_on():
        running.write(1, "train", {"loss": 0.5})
    assert running.run.metrics.is_file()


def test_tensorboard_reads_its_file(log):
    running = log(TensorBoard())
    with running.going_on():
        running.write(5, "train", {"loss": 0.5})
    read = EventAccumulator(str(running.run.folder)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(5, 0.5)]


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in that remembers its runs."""
    module = ModuleType("wandb")
    module.runs = []

    class Run:
        def __init__(self, **options):
            self.options, self.logged, self.is_over = options, [], False
            module.runs.append(self)

        def log(self, figures, step):
            self.logged.append((step, figures))

        def finish(self):
            self.is_over = True

    module.init = Run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_weights_and_biases_goes_on_with_the_run_of_the_folder(log, wandb):
    for first_step in (0, 5):
        running = log(WeightsAndBiases("brains", {"tags": ["x"]}), first_step=first_step)
        with running.going_on():
            running.write(first_step + 5, "train", {"loss": 0.5})
    first, second = wandb.runs
    assert first.options["id"] == second.options["id"]
    assert second.options["resume"] == "allow"
    assert (first.options["project"], first.options["name"], first.options["tags"]) == ("brains", "run", ["x"])
    assert first.options["config"] == {"epochs": 2}
    ((step, figures),) = second.logged
    assert (step, figures["train/loss"], second.is_over) == (10, 0.5, True)


def test_weights_and_biases_that_is_not_installed(log, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"), log(WeightsAndBiases()).going_on():
        pass


def test_where_they_are_named():
    listener = Listener()
    assert means_among({"callbacks": [listener]})[0].callbacks == [listener]
    assert [type(found) for found in Compute().callbacks] == [TensorBoard]
    asked = TrainingMachine(trackers=("tensorboard", "wandb"))
    assert [type(found) for found in asked.callbacks] == [TensorBoard, WeightsAndBiases]
