"""Inputs that were made to harm: each writes files into a folder and returns the command line that is to meet them.

``saved`` has folders with sound models, "classifier", "clip" and "brain", and ``given`` is the folder to write to.
"""

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
import zlib

import nibabel
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from support import captions, pictures

INPUTS = {}
"""Name → function of the folder with sound models and the folder that is given to the command."""
RAN = "ran.txt"
"""What a pickle writes, into the current folder, if anybody runs it."""


def hostile(function):
    INPUTS[function.__name__] = function
    return function


class Program:
    """Unpickled, it runs."""

    def __reduce__(self):
        return os.system, (f"touch {RAN}",)


def _copied(saved, given, name="classifier"):
    return shutil.copytree(saved / name, given / name)


def _rewritten(path, change):
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def _with_config(change, *command, name="classifier", inside="."):
    """A saved model whose configuration was changed."""

    def make(saved, given):
        folder = _copied(saved, given, name)
        _rewritten(folder / inside / "config.json", lambda config: change(config["ermoe"]))
        return [word.format(folder) for word in command]

    return make


def _dense(**args):
    return lambda described: described["dense"]["args"].update(args)


EVALUATED, SHOWN = ("image", "evaluate", "{}", "digits"), ("info", "{}")
CLASSIFIED = ("retrieve", "predict", "{}", "a.png", "--classes", "a", "b")
INPUTS |= {
    "a_million_blocks": _with_config(_dense(depth=10**6), *EVALUATED),
    "a_million_blocks_to_count": _with_config(_dense(depth=10**6), *SHOWN),
    "more_blocks_than_weights": _with_config(_dense(depth=50_000), *EVALUATED),
    "more_blocks_than_weights_to_count": _with_config(_dense(depth=50_000), *SHOWN),
    "a_billion_wide": _with_config(_dense(embed_dim=10**9), *SHOWN),
    "wider_than_weights": _with_config(_dense(mlp_ratio=1e6), *EVALUATED),
    "infinitely_wide": _with_config(_dense(mlp_ratio=float("inf")), *EVALUATED),
    "images_of_a_million_pixels": _with_config(_dense(img_size=[10**6, 10**6]), *SHOWN),
    "ten_million_experts": _with_config(lambda own: own["sparsity"].update(num_experts=10**7), *EVALUATED),
    "more_experts_than_weights": _with_config(lambda own: own["sparsity"].update(num_experts=60_000), *EVALUATED),
    "experts_in_a_long_list": _with_config(lambda own: own["sparsity"].update(num_experts=[4] * 10**5), *EVALUATED),
    "a_tower_that_is_elsewhere": _with_config(
        lambda own: own.update(
            family="open_clip", dense={"class": "CustomTextCLIP", "text": {"hf_model_name": "a/b"}}, sparsity=None
        ),
        *EVALUATED,
    ),
    "a_clip_of_a_million_layers": _with_config(
        lambda own: own["dense"]["text"].update(layers=10**6), *CLASSIFIED, name="clip"
    ),
    "a_clip_of_more_layers_than_weights": _with_config(
        lambda own: own["dense"]["text"].update(layers=40_000), *CLASSIFIED, name="clip"
    ),
    "a_brain_network_of_many_blocks": _with_config(
        lambda own: own["dense"].update(depth=60_000), "brain", "predict", "{}", "scan.nii", name="brain",
        inside="fold-0",
    ),
}  # fmt: skip


@hostile
def a_config_that_is_a_pipe(saved, given):
    folder = _copied(saved, given)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    return ["info", str(folder)]


@hostile
def weights_that_are_a_pipe(saved, given):
    folder = _copied(saved, given)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    return ["image", "evaluate", str(folder), "digits"]


@hostile
def weights_of_eight_bits(saved, given):
    folder = _copied(saved, given)
    _rewritten(folder / "config.json", lambda config: config.update(dtype="float8_e4m3fn"))
    return ["image", "evaluate", str(folder), "digits"]


@hostile
def an_endless_config(saved, given):
    folder = _copied(saved, given)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    return ["info", str(folder)]


@hostile
def a_config_of_ten_gigabytes(saved, given):
    folder = _copied(saved, given)
    os.truncate(folder / "config.json", 10**10)
    return ["info", str(folder)]


@hostile
def a_nested_config(saved, given):
    folder = _copied(saved, given)
    (folder / "config.json").write_text('{"ermoe":' * 100_000)
    return ["info", str(folder)]


@hostile
def a_config_with_a_number_of_many_digits(saved, given):
    folder = _copied(saved, given)
    (folder / "config.json").write_text('{"ermoe": ' + "9" * 100_000 + "}")
    return ["info", str(folder)]


def _with_weights(change):
    def make(saved, given):
        folder = _copied(saved, given)
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")
        return ["image", "evaluate", str(folder), "digits"]

    return make


INPUTS |= {
    "weights_that_are_nan": _with_weights(lambda state: state["head.bias"].fill_(torch.nan)),
    "weights_that_are_infinite": _with_weights(lambda state: state["head.bias"].fill_(-torch.inf)),
    "whole_numbers_for_weights": _with_weights(lambda state: state.update({"head.bias": torch.arange(10)})),
    "weights_of_a_long_name": _with_weights(lambda state: state.update({"a" * 10**6: torch.zeros(1)})),
    "offsets_that_are_infinite": _with_weights(
        lambda state: state["blocks.1.mlp.router.balance.offset_E"].fill_(torch.inf)
    ),
}


def _with_weight_bytes(data):
    def make(saved, given):
        folder = _copied(saved, given)
        (folder / "model.safetensors").write_bytes(data)
        return ["image", "evaluate", str(folder), "digits"]

    return make


INPUTS |= {
    "a_pickle_named_safetensors": _with_weight_bytes(pickle.dumps(Program())),
    "a_header_larger_than_the_file": _with_weight_bytes(struct.pack("<Q", 2**60) + b"{}"),
    "a_nested_header": _with_weight_bytes(struct.pack("<Q", 400_000) + b"[" * 400_000),
    "a_tensor_beyond_the_end": _with_weight_bytes(
        struct.pack("<Q", 64) + b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4]}}'.ljust(64) + b"0000"
    ),
}


def _with_checkpoint(name, write):
    def make(saved, given):
        write(given / name)
        return ["upcycle", "test_vit", "--weights", str(given / name), "--out", str(given / "out")]

    return make


def _bomb(member, head=b""):
    """A zip archive of a kilobyte, of which one member says that it unpacks to a gigabyte."""

    def write(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, head + bytes(2**20))
            archive.filelist[0].file_size = 2**30

    return write


def _array_head(shape):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return head.getvalue()


def _small_npz(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", _array_head((10**12,)) + bytes(64))


INPUTS |= {
    "a_pickle_named_pt": _with_checkpoint("a.pt", lambda path: path.write_bytes(pickle.dumps(Program()))),
    "a_pickle_named_npz": _with_checkpoint("a.npz", lambda path: path.write_bytes(pickle.dumps(Program()))),
    "objects_in_an_npz": _with_checkpoint("a.npz", lambda path: np.savez(path, a=np.array([Program()], object))),
    "a_bomb_named_npz": _with_checkpoint("a.npz", _bomb("a.npy", _array_head((2**28,)))),
    "a_bomb_named_pt": _with_checkpoint("a.pt", _bomb("archive/data/0")),
    "an_array_larger_than_its_file": _with_checkpoint("a.npz", _small_npz),
    "a_view_larger_than_its_memory": _with_checkpoint(
        "a.pt", lambda path: torch.save({"patch_embed.proj.weight": torch.zeros(1).expand(10**6, 10**6)}, path)
    ),
    "a_checkpoint_that_is_a_pipe": _with_checkpoint("a.pt", os.mkfifo),
}


def _with_image(name, write):
    def make(saved, given):
        write(given / name)
        return ["image", "predict", str(saved / "classifier"), str(given / name)]

    return make


def _postscript(path):
    Image.new("RGB", (8, 8)).save(path, "EPS")


def _png(width, height):
    """A picture of zeros, as large as is said, in little room."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def write(path):
        packer = zlib.compressobj(1)
        row = bytes(1 + min(width, 12_000) // 8)
        rows = b"".join(packer.compress(row) for _ in range(min(height, 12_000))) + packer.flush()
        head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))

    return write


_PHOTOGRAPH = pictures.picture(0, (64, 64), "RGB", "JPEG")


def _large(path):
    path.touch()
    os.truncate(path, 10**10)


def _odd_tags(path):
    tags = np.random.default_rng(0).integers(0, 256, 12 * 200, np.uint8).tobytes()
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, 200) + tags)


INPUTS |= {
    "a_picture_with_odd_tags": _with_image("a.tif", _odd_tags),
    "postscript_named_png": _with_image("a.png", _postscript),
    "a_picture_of_gigapixels": _with_image("a.png", _png(2**30, 2**30)),
    "a_picture_that_unpacks_to_much": _with_image("a.png", _png(12_000, 12_000)),
    "a_picture_that_is_a_pipe": _with_image("a.png", os.mkfifo),
    "an_endless_picture": _with_image("a.png", lambda path: path.symlink_to("/dev/zero")),
    "a_picture_of_ten_gigabytes": _with_image("a.jpg", _large),
    "half_a_picture": _with_image("a.jpg", lambda path: path.write_bytes(_PHOTOGRAPH[:400])),
    "a_name_that_colours_the_terminal": _with_image(
        "\x1b]0;mine\x07\x1b[31m\u202egnp.png", lambda path: path.write_bytes(b"no")
    ),
}


@hostile
def a_name_that_is_too_long(saved, given):
    return ["image", "predict", str(saved / "classifier"), str(given / ("a" * 5000 + ".png"))]


@hostile
def a_model_whose_name_is_too_long(saved, given):
    return ["image", "evaluate", str(given / ("a" * 5000)), "digits"]


@hostile
def a_place_to_write_whose_name_is_too_long(saved, given):
    return ["image", "train", "digits-dense", "digits", "--out", str(given / ("a" * 5000))]


@hostile
def a_run_whose_figures_are_a_pipe(saved, given):
    os.mkfifo(given / "metrics.jsonl")
    return ["image", "train", "digits-dense", "digits", "--out", str(given), "--epochs", "2"]


def _with_run(name, write):
    """The folder of a run of which a part is something else."""

    def make(saved, given):
        place = given / "run" / name
        place.parent.mkdir(parents=True)
        write(place)
        return ["image", "train", "digits-dense", "digits", "--out", str(given / "run"), "--epochs", "2"]

    return make


def _at_home(place):
    home = next(parent for parent in place.parents if parent.name == "given").with_name("home")
    place.symlink_to(home / ("figures" if place.suffix else ""))


INPUTS |= {
    "a_run_whose_checkpoints_are_elsewhere": _with_run("checkpoints", _at_home),
    "a_run_whose_figures_are_elsewhere": _with_run("metrics.jsonl", _at_home),
    "a_run_whose_best_model_is_elsewhere": _with_run("checkpoints/best", _at_home),
    "a_run_whose_model_is_a_file": _with_run("model", lambda place: place.write_text("mine")),
    "a_run_whose_checkpoint_is_a_pickle": _with_run(
        "checkpoints/last.pt", lambda place: place.write_bytes(pickle.dumps(Program()))
    ),
}


def _with_data(write):
    def make(saved, given):
        write(given)
        return ["image", "evaluate", str(saved / "classifier"), str(given)]

    return make


def _idx(images, compress=gzip.compress):
    def write(given):
        pictures.idx(given)
        (given / "t10k-images-idx3-ubyte.gz").write_bytes(compress(images))

    return write


def _idx_head(*shape):
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()


def _shard(*members):
    """A training shard and a test shard of (name, kind, size said, data, linked to)."""

    def write(given):
        for split in ("train", "val"):
            with tarfile.open(given / f"{split}-0.tar", "w") as tar:
                for name, kind, data, target in members:
                    member = tarfile.TarInfo(name)
                    member.type, member.size, member.linkname = kind, len(data), target
                    tar.addfile(member, io.BytesIO(data))

    return write


def _said(change):
    """A shard with a sound pair, of which the first header was changed."""

    def write(given):
        _shard(("0.png", tarfile.REGTYPE, pictures.picture(0), ""), ("0.cls", tarfile.REGTYPE, b"0", ""))(given)
        for path in given.glob("*.tar"):
            data = bytearray(path.read_bytes())
            change(data)
            data[148:156] = b" " * 8
            data[148:156] = f"{sum(data[:512]):06o}\0 ".encode()
            path.write_bytes(data)

    return write


def _negative(data):
    data[124:136] = (2**96 - 1024).to_bytes(12, "big")


def _terabyte(data):
    data[124:136] = b"\x80" + (2**40).to_bytes(11, "big")


def _sparse(data):
    data[156:157] = b"S"
    data[386:482] = b"00000000000\0" * 8
    data[483:495] = b"\x80" + (2**40).to_bytes(11, "big")


INPUTS |= {
    "images_that_unpack_without_end": _with_data(
        _idx(_idx_head(12, 28, 28), lambda head: gzip.compress(head + bytes(2**20)) + gzip.compress(bytes(2**24)) * 99)
    ),
    "images_without_number": _with_data(_idx(_idx_head(*[2**32 - 1] * 3))),
    "a_link_out_of_a_shard": _with_data(
        _shard(("0.png", tarfile.SYMTYPE, b"", "/etc/passwd"), ("0.cls", tarfile.REGTYPE, b"0", ""))
    ),
    "a_shard_that_leads_back": _with_data(_said(_negative)),
    "a_shard_of_a_terabyte": _with_data(_said(_terabyte)),
    "a_sparse_member_of_a_shard": _with_data(_said(_sparse)),
    "a_billion_classes": _with_data(
        _shard(("0.png", tarfile.REGTYPE, pictures.picture(0), ""), ("0.cls", tarfile.REGTYPE, b"999999999", ""))
    ),
    "a_shard_that_is_a_pipe": _with_data(lambda given: [os.mkfifo(given / f"{name}.tar") for name in ("train", "val")]),
    "a_pickled_data_set": _with_data(
        lambda given: (pictures.cifar10_pickled(given) / "test_batch").write_bytes(pickle.dumps(Program()))
    ),
}  # fmt: skip


def _with_captions(name, data):
    def make(saved, given):
        (given / name).write_bytes(data)
        return ["retrieve", "evaluate", str(saved / "clip"), str(given / name), "--split", "all"]

    return make


INPUTS |= {
    "nested_captions": _with_captions("a.json", b"[" * 100_000),
    "captions_with_a_number_of_many_digits": _with_captions("a.json", b"[" + b"9" * 100_000 + b"]"),
    "captions_in_latin": _with_captions("a.tsv", "image\tcaption\na.jpg\tcafé\n".encode("latin1")),
    "captions_with_nothing_between": _with_captions("a.csv", b"image,caption\na\0.jpg,a dog\n"),
    "captions_of_an_image_of_a_long_name": _with_captions("a.tsv", b"image\tcaption\n" + b"a" * 5000 + b".jpg\tdog\n"),
}


@hostile
def captions_of_an_image_that_is_a_pipe(saved, given):
    captions.flickr8k(given)
    image = next((given / "images").iterdir())
    image.unlink()
    os.mkfifo(image)
    return ["retrieve", "evaluate", str(saved / "clip"), str(given), "--split", "all"]


def _with_table(name, data):
    def make(saved, given):
        (given / name).write_bytes(data)
        return ["brain", "check", str(given / name)]

    return make


INPUTS |= {
    "a_table_with_nothing_between": _with_table("a.csv", b"participant_id,t1,age\n1,a\0.nii,50\n"),
    "a_table_in_utf_16": _with_table("a.csv", "participant_id,t1,age\n1,a.nii,50\n".encode("utf-16")),
    "a_person_of_many_digits": _with_table("a.csv", b"participant_id,t1,age\n" + b"9" * 10_000 + b",a.nii,50\n"),
    "a_cell_without_end": _with_table("a.csv", b'participant_id,t1,age\n1,a.nii,"' + b"9" * 200_000 + b'"\n'),
    "scans_that_are_all_gone": _with_table(
        "a.csv", b"participant_id,t1,age\n" + b"".join(b"%d,gone/%d.nii,50\n" % (n, n) for n in range(200_000))
    ),
    "a_hundred_thousand_columns": _with_table("a.csv", b",".join(b"%d" % n for n in range(100_000)) + b"\n"),
}


def _with_scan(name, write):
    def make(saved, given):
        write(given / name)
        return ["brain", "check", str(given / name)]

    return make


def _scan(*dim):
    def write(path):
        image = nibabel.Nifti1Image(np.zeros((4, 4, 4), np.int16), np.eye(4))
        data = bytearray(image.to_bytes())
        data[40:56] = struct.pack("<8h", len(dim), *dim, *[1] * (7 - len(dim)))
        path.write_bytes(gzip.compress(bytes(data)) if path.suffix == ".gz" else bytes(data))

    return write


INPUTS |= {
    "a_scan_of_negative_size": _with_scan("a.nii", _scan(-4, 4, 4)),
    "a_scan_without_end": _with_scan("a.nii.gz", _scan(32767, 32767, 32767)),
    "a_scan_of_many_axes": _with_scan("a.nii", _scan(32767, 32767, 32767, 32767, 32767, 32767, 32767)),
    "a_scan_that_is_a_pipe": _with_scan("a.nii", os.mkfifo),
    "a_scan_that_unpacks_to_something_else": _with_scan(
        "a.nii.gz", lambda path: path.write_bytes(gzip.compress(bytes(2**24)) * 99)
    ),
    "half_a_scan": _with_scan("a.nii", lambda path: path.write_bytes(b"\x5c\x01\0\0" + bytes(60))),
}


@hostile
def a_sidecar_without_end(saved, given):
    (given / "a.csv").write_text("participant_id,t1,age\n1,a.nii,50\n")
    (given / "a.json").write_text("[" * 100_000)
    return ["brain", "check", str(given / "a.csv")]


def _with_brain(change):
    def make(saved, given):
        folder = _copied(saved, given, "brain")
        _rewritten(folder / "brain_age.json", change)
        return ["brain", "predict", str(folder), "scan.nii", "--out", str(given / "out")]

    return make


INPUTS |= {
    "a_fold_elsewhere": _with_brain(lambda model: model.update(folds=["../../elsewhere"])),
    "a_trillion_bins": _with_brain(lambda model: model["head"].update(step=1e-11)),
    "a_grid_without_end": _with_brain(lambda model: model["preprocessing"].update(shape=[10**6] * 3)),
    "a_model_that_is_a_list": _with_brain(lambda model: model.update(parts=[1])),
}
