"""Models as files that run without ermoe."""

import copy
import os
import subprocess
import sys

import pytest
import timm
import torch

import ermoe
from ermoe.brain.rivals.sfcn import SFCN
from ermoe.errors import UserError
from ermoe.models.export import limit_places, to_program
from ermoe.models.vit3d import ViT3D
from support.backbones import apart, build, distance, outputs, perturb, photographs


@pytest.fixture(scope="module")
def sparse():
    torch.manual_seed(0)
    dense = perturb(timm.create_model("test_vit", num_classes=10, img_size=64, depth=2, global_pool="avg")).eval()
    return apart(ermoe.upcycle(dense, num_experts=4), scale=0.1)


RUN_WITHOUT_ERMOE = """
import sys
sys.modules["ermoe"] = sys.modules["timm"] = None  # importing either fails
import numpy as np
file, images, outputs = sys.argv[1:]
x = np.load(images)
if file.endswith(".onnx"):
    import onnxruntime
    y = onnxruntime.InferenceSession(file).run(None, {"images": x})[0]
else:
    import torch
    y = torch.export.load(file).module()(torch.from_numpy(x)).detach().numpy()
np.save(outputs, y)
"""


@pytest.mark.no_cover
@pytest.mark.parametrize(("suffix", "path"), [(".onnx", "sparse"), (".pt2", "every-expert")])
def test_the_file_runs_without_ermoe_and_for_other_batches(sparse, suffix, path, tmp_path):
    import numpy as np

    exported = ermoe.export(sparse, tmp_path / f"model{suffix}", image_size=64, path=path)
    assert exported.difference < 1e-4
    images = photographs(64)[:5]
    np.save(tmp_path / "images.npy", images.numpy())
    command = [sys.executable, "-c", RUN_WITHOUT_ERMOE, str(exported.file)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*command, str(tmp_path / "images.npy"), str(tmp_path / "outputs.npy")], check=True, env=clean)
    theirs = torch.from_numpy(np.load(tmp_path / "outputs.npy"))
    assert distance(theirs, outputs(sparse, images)) < 1e-4


class TestCapacity:
    def test_with_room_for_all_it_is_the_model(self, sparse):
        for options in ({}, {"shared": "dense"}, {"num_experts": 1, "top_k": 1}):
            limited = apart(ermoe.upcycle(build("test_vit")[0], **{"num_experts": 4} | options))
            before = outputs(limited, photographs(64))
            limit_places(limited, 2.0)
            assert distance(outputs(limited, photographs(64)), before) < 1e-4

    def test_without_room_pairs_of_low_weight_are_dropped(self):
        """Against the slow twin: token by token, expert by expert."""
        layer = apart(ermoe.upcycle(build("test_vit")[0], num_experts=4), scale=0.1).blocks[1].mlp
        generator = torch.Generator().manual_seed(0)
        x, context = torch.randn(2, 3, 17, 64, generator=generator)
        weight = layer.route(x, context).dense_weights().view(3, 17, 4).detach()
        expected = torch.zeros_like(x)
        places = 7  # ⌈17 · 2 · 0.8 / 4⌉
        with torch.no_grad():
            for image in range(3):
                for expert in range(4):
                    for token in weight[image, :, expert].argsort(descending=True, stable=True)[:places]:
                        count = torch.zeros(4, dtype=torch.long)
                        count[expert] = 1
                        output = layer.experts(x[image, token].unsqueeze(0), count)
                        expected[image, token] += weight[image, token, expert] * output[0]
            limit_places(layer, 0.8)
            assert torch.allclose(layer(x, context), expected, atol=1e-5)

    def test_an_expert_that_chooses_keeps_its_places(self):
        """With f = 1 there are as many places as the experts of expert choice take."""
        layer = apart(ermoe.upcycle(build("test_vit")[0], num_experts=4, router="expert-choice")).blocks[1].mlp
        x = torch.randn(3, 17, 64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            before = layer(x)
            limit_places(layer, 1.0)
            assert torch.allclose(layer(x), before, atol=1e-5)

    def test_the_file_has_the_limited_models_outputs(self, sparse, tmp_path):
        exact = ermoe.export(sparse, tmp_path / "a.onnx", image_size=64, path="capacity", capacity_factor=2)
        assert exact.difference < 1e-4
        tight = ermoe.export(
            sparse, tmp_path / "b.pt2", image_size=64, path="capacity", capacity_factor=0.6, dynamic_batch=False
        )
        assert tight.difference > 1e-3

    @pytest.mark.no_cover
    def test_it_is_cheaper_and_so_are_shapes_that_depend_on_data(self, sparse):
        images = photographs(64)[:1]
        work = []
        for path in ("every-expert", "sparse", "capacity"):
            program = to_program(sparse, images, path=path, capacity_factor=1.0, dynamic_batch=False)
            from torch.utils.flop_counter import FlopCounterMode

            with FlopCounterMode(display=False) as counter:
                program.module()(images)
            work.append(counter.get_total_flops())
        assert work[1] <= work[2] < work[0]  # places are rounded up, pairs are not


@pytest.mark.no_cover
class TestVolumes:
    @pytest.fixture
    def sparse(self):
        torch.manual_seed(0)
        dense = perturb(ViT3D((8, 8, 4), patch_size=4, embed_dim=48, depth=2, num_heads=4))
        return apart(ermoe.upcycle(dense, num_experts=4), scale=0.1)

    def test_any_number_of_volumes(self, sparse, tmp_path):
        import onnxruntime

        sparse.train()
        sparse.blocks[0].eval()
        exported = ermoe.export(sparse, tmp_path / "model.onnx")
        assert exported.difference < 1e-4
        assert (sparse.training, sparse.blocks[0].mlp.training, sparse.blocks[1].training) == (True, False, True)
        volumes = torch.randn(5, 1, 8, 8, 4, generator=torch.Generator().manual_seed(1))
        theirs = onnxruntime.InferenceSession(exported.file).run(None, {"images": volumes.numpy()})[0]
        assert distance(torch.from_numpy(theirs), outputs(sparse.eval(), volumes)) < 1e-4

    def test_one_number_has_a_difference_too(self, sparse, tmp_path):
        assert ermoe.export(sparse, tmp_path / "model.pt2", dynamic_batch=False).difference < 1e-4


class TestSharedPlaces:
    def build(self, **options):
        dense = timm.create_model("test_vit", img_size=64, depth=2, num_classes=10)
        return apart(ermoe.upcycle(perturb(dense), num_experts=4, router="v-moe", **options).eval())

    def test_they_want_a_fixed_batch(self, tmp_path):
        with pytest.raises(UserError, match=r"blocks\.1\.mlp: images of a batch share.*dynamic_batch=False"):
            ermoe.export(self.build(), tmp_path / "model.pt2")
        assert ermoe.export(self.build(), tmp_path / "model.pt2", dynamic_batch=False).difference < 1e-4

    @pytest.mark.no_cover
    @pytest.mark.parametrize("options", [{"eval_capacity_factor": None}, {"group_size": 1}])
    def test_without_them_any_batch_will_do(self, options):
        sparse = self.build(**options)
        program = to_program(sparse, photographs(64)[:2])
        assert distance(program.module()(photographs(64)[:5]), outputs(sparse, photographs(64)[:5])) < 1e-4


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["hugging face", "torchvision", "eva02_tiny_patch14_224"])
def test_other_families_export(name):
    dense, size = build(name)
    sparse = ermoe.upcycle(dense, num_experts=4, blocks=[1])
    images = photographs(size)[:1]
    program = to_program(sparse, images, dynamic_batch=False)
    assert distance(program.module()(images).detach(), outputs(sparse, images)) < 1e-4


@pytest.mark.no_cover
def test_the_model_is_left_alone(sparse):
    before = outputs(sparse, photographs(64))
    to_program(sparse, photographs(64)[:1], path="capacity", dynamic_batch=False)
    assert not any(module.every_expert for module in sparse.modules() if isinstance(module, ermoe.MoE))
    assert type(sparse.blocks[1].mlp) is ermoe.EigenMoE
    assert torch.equal(outputs(sparse, photographs(64)), before)


def test_bad_names_and_paths_are_refused(sparse, tmp_path):
    with pytest.raises(ValueError, match=r"\.onnx or \.pt2"):
        ermoe.export(sparse, tmp_path / "model.bin")
    with pytest.raises(ValueError, match="path='sorted'"):
        ermoe.export(sparse, tmp_path / "model.onnx", path="sorted")
    with pytest.raises(UserError, match="capacity_factor=0"):
        ermoe.export(sparse, tmp_path / "model.onnx", path="capacity", capacity_factor=0)
    with pytest.raises(UserError, match="image_size=-1"):
        ermoe.export(sparse, tmp_path / "model.onnx", image_size=-1)
    with pytest.raises(UserError, match=r"no bfloat16; export model\.float\(\)"):
        ermoe.export(copy.deepcopy(sparse).bfloat16(), tmp_path / "model.onnx")
    with pytest.raises(UserError, match="this SFCN takes images of any size"):
        ermoe.export(SFCN(channels=(4, 4, 4)), tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == []


def test_a_missing_package_is_named(sparse, tmp_path, monkeypatch):
    monkeypatch.setattr("ermoe.models.export.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"onnx.*pip install 'ermoe\[export\]'"):
        ermoe.export(sparse, tmp_path / "model.onnx", image_size=64)
    assert os.listdir(tmp_path) == []


@pytest.mark.no_cover
def test_torchs_own_exporters_take_any_batch(sparse, tmp_path):
    import onnxruntime

    images = photographs(64)[:3]
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    with torch.no_grad():
        program = torch.export.export(sparse, (images[:2],), dynamic_shapes=shapes)
        torch.onnx.export(
            sparse, (images[:2],), tmp_path / "a.onnx", input_names=["images"], dynamic_shapes=shapes, verbose=False
        )
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    theirs = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    for outcome in (program.module()(images).detach(), theirs):
        assert distance(outcome, outputs(sparse, images)) < 1e-4
    with pytest.raises(ValueError, match=r"graph depends on the batch.*ermoe\.export"):
        torch.export.export(TestSharedPlaces().build(), (images[:2],), dynamic_shapes=shapes)
    with pytest.raises(RuntimeError, match=r"graph depends on the batch.*ermoe\.export"):
        torch.onnx.export(TestSharedPlaces().build(), (images[:2],), dynamic_shapes=shapes, verbose=False)
