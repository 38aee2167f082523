"""Whatever a file has become, a reader takes it or refuses it in a sentence: no other exception leaves the library.

A few examples each, always the same; with ERMOE_FUZZ_SECONDS=120 in the environment, others for two minutes of
computing each.
"""

import itertools
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

import ermoe
from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.nifti import inspect_image
from ermoe.brain.data.splits import Splits
from ermoe.brain.model import BrainAgeModel
from ermoe.data.decode import decode
from ermoe.data.images import open_images
from ermoe.data.shard_index import _read
from ermoe.errors import UserError
from ermoe.files import to_json
from ermoe.images.predicting import class_names
from ermoe.models.weights.stored import read_checkpoint
from ermoe.retrieval.captions.catalogue import open_captions
from ermoe.studies.record import add_records, read_records
from ermoe.train import checkpoint, parts
from ermoe.train.compute import Processes
from ermoe.train.run_folder import RunFolder
from ermoe.train.settings import Training
from support import captions, mutations, pictures, saves

SECONDS = float(os.environ.get("ERMOE_FUZZ_SECONDS", 0))
READERS = {}
"""Name → (makes a folder of sound files, those that are damaged, reads them, how they are damaged, examples)."""


def reader(*files, damage=mutations.mutated, examples=12):
    """Declares a reader: the function makes the files of a folder and returns what reads them."""

    def declare(make):
        READERS[make.__name__] = (make, files, damage, examples)
        return make

    return declare


@reader("config.json", damage=mutations.json_values, examples=8)
def config(folder):
    saves.classifier(folder)
    return lambda: ermoe.load(folder)


@reader("config.json", examples=8)
def config_text(folder):
    saves.classifier(folder)
    return lambda: ermoe.models.io.weightless(folder)


@reader("config.json", damage=mutations.json_values, examples=4)
def transformers_config(folder):
    pytest.importorskip("transformers")
    saves.hugging_face(folder)
    return lambda: ermoe.load(folder)


@reader("model.safetensors", damage=mutations.safetensors_header, examples=8)
def safetensors(folder):
    saves.classifier(folder)
    return lambda: ermoe.load(folder)


@reader("model.safetensors")
def safetensors_bytes(folder):
    saves.classifier(folder)
    return lambda: read_checkpoint(folder / "model.safetensors")


@reader("model.safetensors.index.json", damage=mutations.json_values, examples=8)
def weights_in_several_files(folder):
    model = ermoe.load(saves.classifier(folder))
    ermoe.models.io.save_state(model, model.state_dict(), folder, largest_file=20_000)
    return lambda: ermoe.load(folder)


@reader("parts-1-0/1-0.safetensors", examples=8)
def run_checkpoint_in_parts(folder):
    tensors = {"model.weight": torch.ones(3, 4), "optimizer.weight.step": torch.ones(())}
    parts.write(folder / "parts-1-0", tensors)
    return lambda: (parts.stored_names(folder / "parts-1-0"), parts.read(folder / "parts-1-0", tensors))


@reader("a.npz")
def npz(folder):
    np.savez(folder / "a.npz", weight=np.zeros((3, 4), np.float32), bias=np.zeros(3))
    return lambda: read_checkpoint(folder / "a.npz")


@reader("a.pt", "old.pt")
def torch_files(folder):
    torch.save({"model": {"weight": torch.zeros(3, 4)}}, folder / "a.pt")
    torch.save({"weight": torch.zeros(3, 4)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    return lambda: [read_checkpoint(folder / name) for name in ("a.pt", "old.pt")]


@reader("last.pt")
def run_checkpoint(folder):
    state = {"model": {}, "optimizer": {}, "position": {"epoch": 1}, "scaler": {}, "task": {}, "average": None}
    checkpoint.write(folder / "last.pt", state)
    return lambda: checkpoint.read(folder / "last.pt")


def _all(folder, *splits):
    for split in splits:
        images = open_images(folder, split)
        for index in range(min(len(images), 2)):
            images.read(index)


@reader("cifar-10-batches-bin/test_batch.bin", "cifar-10-batches-bin/batches.meta.txt")
def cifar(folder):
    pictures.cifar10(folder, num_train=2, num_test=2)
    return lambda: _all(folder, "test")


@reader("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
def idx(folder):
    pictures.idx(folder, compressed=False, num=3)
    return lambda: _all(folder, "test")


@reader("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
def idx_packed(folder):
    pictures.idx(folder, num=3)
    return lambda: _all(folder, "test")


@reader("wnids.txt", "val/val_annotations.txt")
def tiny_imagenet(folder):
    pictures.tiny_imagenet(folder)
    return lambda: _all(folder, "train", "test")


@reader("train-000.tar", "val-000.tar", damage=mutations.tar_headers, examples=20)
def shards(folder):
    pictures.shards(folder)
    return lambda: _all(folder, "train", "test")


@reader("classes.txt", "train-000.tar")
def named_shards(folder):
    pictures.shards(folder)
    (folder / "classes.txt").write_text("cat\ndog\nowl\n")
    return lambda: _all(folder, "train")


@reader(*(f"a.{kind}" for kind in ("png", "jpeg", "gif", "tiff", "webp", "bmp", "ppm")), examples=20)
def images(folder):
    for kind in ("png", "jpeg", "gif", "tiff", "webp", "bmp", "ppm"):
        (folder / f"a.{kind}").write_bytes(pictures.picture(0, mode="P" if kind == "gif" else "RGB", format=kind))

    def read():
        for path in folder.iterdir():
            try:
                decode(path.read_bytes(), path.name)
            except UserError:
                continue

    return read


@reader("annotations/captions_val2017.json", damage=mutations.json_values)
def coco(folder):
    captions.coco(folder, count=2, captions=2)
    return lambda: open_captions(folder, "custom", "all")


@reader("dataset_coco.json", damage=mutations.json_values)
def karpathy(folder):
    captions.karpathy(folder)
    return lambda: open_captions(folder, "custom", "test")


@reader("a.json", damage=mutations.json_values)
def caption_list(folder):
    captions.files(folder, ["a.jpg", "b.jpg"])
    (folder / "a.json").write_text(
        '[{"image": "a.jpg", "caption": ["a dog", "a cat"], "split": "test"}, {"image": "b.jpg", "caption": "a car"}]'
    )
    return lambda: open_captions(folder, "custom", "test")


@reader("a.json")
def caption_text(folder):
    caption_list(folder)
    return lambda: open_captions(folder, "custom", "all")


@reader("Flickr8k.token.txt", "Flickr_8k.testImages.txt")
def tokens(folder):
    captions.flickr8k(folder, train=1, dev=1, test=2)
    return lambda: open_captions(folder, "custom", "test")


@reader("a.csv")
def caption_table(folder):
    captions.files(folder, ["a.jpg", "b.jpg"])
    (folder / "a.csv").write_text('image,caption,split\na.jpg,"a dog, a cat",test\nb.jpg,"[""a"", ""b""]",test\n')
    return lambda: open_captions(folder / "a.csv", "custom", "test")


@reader("index", examples=20)
def shard_index(folder):
    (folder / "index").write_text('2\n["a", 512, 100, "7"]\n["b", 2048, 99, "\\u00ff"]\n')
    return lambda: _read(folder / "index", (str, int, int, str))


@reader("test-000.tar", damage=mutations.tar_headers)
def caption_shards(folder):
    captions.shards(folder)
    return lambda: open_captions(folder, "custom", "test")


@reader("a.nii", examples=20)
def nifti(folder):
    nibabel = pytest.importorskip("nibabel")
    values = np.random.default_rng(0).integers(0, 900, (6, 5, 4)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([2.0, 2, 2, 1])), folder / "a.nii")
    return lambda: inspect_image(folder / "a.nii", "sub-01")


@reader("a.nii.gz")
def nifti_packed(folder):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.eye(6)[:, :, None].repeat(4, 2), np.eye(4)), folder / "a.nii.gz")
    return lambda: inspect_image(folder / "a.nii.gz", "sub-01")


def _bids(folder):
    for session in ("ses-1", "ses-2"):
        for place in ("sub-01", "derivatives/tool/sub-01"):
            (folder / place / session / "anat").mkdir(parents=True)
        (folder / "sub-01" / session / "anat" / f"sub-01_{session}_T1w.nii.gz").touch()
        (folder / "derivatives/tool/sub-01" / session / "anat" / f"sub-01_{session}_dseg.nii.gz").touch()
    (folder / "participants.tsv").write_text("participant_id\tage\tsex\tsite\nsub-01\t50.5\t1\tA\n")
    (folder / "participants.json").write_text(
        '{"sex": {"Levels": {"1": "male", "2": {"Description": "female"}}}, "age": {"Units": "years"}}'
    )
    (folder / "sub-01" / "sub-01_sessions.tsv").write_text(
        "session_id\tacq_time\tage\nses-1\t2020-01-01T00:00:00\t50\nses-2\t2021-01-01T00:00:00\tn/a\n"
    )
    (folder / "derivatives" / "tool" / "dseg.tsv").write_text("index\tname\n1\tCSF\n2\tGM\n3\tWM\n")
    return lambda: open_cohort(folder, age_is_baseline=True)


@reader("participants.tsv", "sub-01/sub-01_sessions.tsv", "derivatives/tool/dseg.tsv", examples=20)
def bids_tables(folder):
    return _bids(folder)


@reader("participants.json", damage=mutations.json_values)
def bids_sidecars(folder):
    return _bids(folder)


@reader("participants.json")
def bids_sidecar_text(folder):
    return _bids(folder)


@reader("a.csv", "a.json")
def flat_tables(folder):
    (folder / "a.csv").write_text("participant_id,t1,age,sex,dseg\n1,a.nii,50,F,a_dseg.nii\n2,b.nii,60+,M,n/a\n")
    (folder / "a.json").write_text('{"age": {"Units": "years"}}')
    return lambda: open_cohort(folder / "a.csv")


@reader("splits.tsv")
def splits(folder):
    (folder / "splits.tsv").write_text("participant_id\tfold-0\tfold-1\nsub-01\ttrain\ttest\nsub-02\ttest\ttrain\n")
    return lambda: Splits.load(folder / "splits.tsv", [])


@reader("brain_age.json", damage=mutations.json_values, examples=8)
def brain_age(folder):
    saves.brain_age(folder)
    return lambda: BrainAgeModel.load(folder)


@reader("fold-0/config.json", damage=mutations.json_values, examples=8)
def brain_network(folder):
    saves.brain_age(folder)
    return lambda: BrainAgeModel.load(folder)


@reader("config.json", damage=mutations.json_values, examples=6)
def clip_config(folder):
    pytest.importorskip("open_clip")
    saves.clip(folder)
    return lambda: ermoe.models.io.weightless(folder)


@reader("index.json", damage=mutations.json_values, examples=6)
def index(folder):
    pytest.importorskip("open_clip")
    from ermoe.retrieval.index import build_index, open_index

    captions.files(folder / "images", ["a.jpg", "b.jpg"])
    build_index(saves.clip(folder / "clip"), folder / "images", folder)
    return lambda: open_index(folder)


@reader("features.safetensors", damage=mutations.safetensors_header, examples=6)
def index_features(folder):
    return index(folder)


@reader("config.json", damage=mutations.json_values)
def run_config(folder):
    asked = {"data": "digits", "training": to_json(Training()), "model_args": {"depth": 2}}
    RunFolder(folder).open(asked, "auto", Processes())
    return lambda: RunFolder(folder).open(asked, "auto", Processes())


@reader("classes.json", damage=mutations.json_values)
def run_classes(folder):
    (folder / "classes.json").write_text('["cat", "dog"]')
    return lambda: class_names(folder, 2)


@reader("records.jsonl")
def records(folder):
    own = {"study": "s", "name": "a", "seed": 1, "settings": {}, "figures": {}, "seconds": 1.0, "environment": {"a": 1}}
    add_records(folder / "records.jsonl", own, {**own, "seed": 2})
    return lambda: read_records(folder / "records.jsonl")


@pytest.mark.timeout(120 + 20 * SECONDS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_only_sentences_leave_a_reader(name, tmp_path):
    make, files, damage, examples = READERS[name]
    folder = tmp_path / "read"
    folder.mkdir()
    read = make(folder)
    read()  # sound files are read
    sound = {file: (folder / file).read_bytes() for file in files}

    def check(changes):
        file = files[changes[0][2] % len(files)]
        (folder / file).write_bytes(damage(sound[file], changes))
        try:
            read()
        except UserError:
            pass
        finally:
            (folder / file).write_bytes(sound[file])

    quickly = settings(
        max_examples=examples, deadline=None, database=None, derandomize=not SECONDS,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    began = time.process_time()
    for number in itertools.count():
        run = quickly(given(mutations.edits)(check))
        (seed(number)(run) if SECONDS else run)()
        if time.process_time() - began >= SECONDS:
            break
