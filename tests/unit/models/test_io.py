"""Saving and loading: the same model comes back, and what is wrong with a file is said in one sentence."""

import copy
import functools
import json
import os
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import ermoe
import ermoe.models.vit
from ermoe.errors import UserError
from ermoe.models import io
from ermoe.models.io import describe
from support import saves
from support.backbones import ACCEPTED, apart, build, outputs, perturb, photographs

KINDS = {
    "eigen": {"num_experts": 4, "rank": 24, "threshold": 0.3, "below_threshold": "prune"},
    "merged": {"num_experts": 4},
    "dense experts": {"num_experts": 3, "experts": "dense", "context_of": "attention"},
    "prototype": {"num_experts": 4, "score": "prototype", "balance": "mean"},
    "v-moe": {"router": "v-moe", "num_experts": 4},
    "soft": {"router": "soft", "num_experts": 4},
}


def sparse_model(name, kind="eigen"):
    """A copy of a model that is made once."""
    return copy.deepcopy(made(name, kind))


@functools.cache
def made(name, kind):
    dense, size = build(name)
    model = apart(ermoe.upcycle(dense, **KINDS[kind])).eval()
    return (ermoe.merge(model) if kind == "merged" else model), size


def same(a, b, size):
    return torch.equal(outputs(a.eval(), photographs(size)), outputs(b.eval(), photographs(size)))


class TestRoundTrip:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_of_layer(self, kind, tmp_path):
        model, size = sparse_model("test_vit", kind)
        ermoe.save(model, tmp_path)
        loaded = ermoe.load(tmp_path)
        assert same(model, loaded, size)
        assert loaded.sparsity == model.sparsity
        assert loaded.state_dict().keys() == model.state_dict().keys()

    @pytest.mark.parametrize("name", [*ACCEPTED, "torchvision", "hugging face"])
    def test_every_backbone(self, name, tmp_path):
        model, size = sparse_model(name)
        ermoe.save(model, tmp_path)
        assert same(model, ermoe.load(tmp_path), size)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_not_numbers_are_refused(self, value, tmp_path):
        model, _ = sparse_model("test_vit")
        with torch.no_grad():
            model.blocks[0].attn.proj.weight[0, 0] = value
        ermoe.save(model, tmp_path)
        with pytest.raises(UserError, match=r"not numbers: blocks\.0\.attn\.proj\.weight; its training diverged"):
            ermoe.load(tmp_path)

    def test_the_group_may_read_it_and_settings_are_finite(self, tmp_path):
        before = os.umask(0o027)
        try:
            ermoe.save(ermoe.upcycle(build("test_vit")[0], num_experts=2, score="logit"), tmp_path)
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
        assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "model.safetensors").values())
        router = ermoe.load(tmp_path).blocks[1].mlp.router
        assert (router.capacity_factor, router.score.route_rank) == (None, None)

    def test_a_dense_model(self, tmp_path):
        model, size = build("test_vit2")
        ermoe.save(model, tmp_path)
        assert same(model, ermoe.load(tmp_path), size)

    def test_a_registered_model(self, tmp_path):
        model = perturb(timm.create_model("test_ermoe_vit", num_classes=7, blocks=[0, 5], drop_path_rate=0.1)).eval()
        ermoe.save(model, tmp_path)
        loaded = ermoe.load(tmp_path)
        assert same(model, loaded, 96)
        assert loaded.blocks[5].drop_path1.drop_prob == pytest.approx(0.1)

    def test_half_precision_stays(self, tmp_path):
        model = sparse_model("test_vit")[0].bfloat16()
        ermoe.save(model, tmp_path)
        loaded = ermoe.load(tmp_path)
        assert loaded.blocks[1].mlp.experts.up.U.dtype == torch.bfloat16
        assert loaded.blocks[1].mlp.router.balance.offset_E.dtype == torch.float32
        assert torch.equal(outputs(model, photographs(64).bfloat16()), outputs(loaded, photographs(64).bfloat16()))

    def test_a_second_save_replaces_the_first(self, tmp_path):
        first, size = sparse_model("test_vit")
        ermoe.save(first, tmp_path)
        second, _ = sparse_model("test_vit", "merged")
        ermoe.save(second, tmp_path)
        assert same(second, ermoe.load(tmp_path), size)
        assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]

    def test_training_goes_on(self, tmp_path):
        model, _ = sparse_model("test_vit")
        ermoe.save(model, tmp_path)
        loaded = ermoe.load(tmp_path).train()
        loaded(photographs(64)).sum().backward()
        ermoe.update_balance(loaded)
        assert loaded.blocks[1].mlp.router.balance.offset_E.isfinite().all()


class TestTimm:
    @pytest.mark.parametrize("name", ["test_vit", "vit_small_plus_patch16_dinov3", "deit_tiny_distilled_patch16_224"])
    @pytest.mark.parametrize("kind", ["eigen", "merged"])
    def test_local_dir(self, name, kind, tmp_path):
        model, size = sparse_model(name, kind)
        ermoe.save(model, tmp_path)
        assert same(model, timm.create_model(f"local-dir:{tmp_path}", pretrained=True), size)

    def test_local_dir_of_a_registered_and_of_a_dense_model(self, tmp_path):
        for model in (timm.create_model("test_ermoe_vit", num_classes=3), build("test_vit")[0]):
            ermoe.save(model, tmp_path)
            size = 96 if model.num_classes == 3 else 64
            assert same(model, timm.create_model(f"local-dir:{tmp_path}", pretrained=True), size)

    def test_another_head_and_image_size(self, tmp_path):
        model, _ = sparse_model("vit_tiny_patch16_224")
        ermoe.save(model, tmp_path)
        other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3, img_size=96).eval()
        assert outputs(other, photographs(96)).shape == (8, 3)
        assert torch.equal(other.blocks[1].mlp.experts.up.U, model.blocks[1].mlp.experts.up.U)

    def test_without_pretrained_weights_are_drawn(self, tmp_path):
        model, _ = sparse_model("test_vit")
        ermoe.save(model, tmp_path)
        fresh = timm.create_model(f"local-dir:{tmp_path}")
        assert float(ermoe.orthogonality_loss(fresh).detach()) < 1e-7

    @pytest.mark.parametrize("kind", ["eigen", "merged"])
    def test_what_local_dir_gives_can_be_saved_again(self, kind, tmp_path):
        model, _ = sparse_model("test_vit", kind)
        ermoe.save(model, tmp_path / "first")
        again = timm.create_model(f"local-dir:{tmp_path / 'first'}", pretrained=True, num_classes=3, img_size=96)
        assert again.pretrained_cfg["architecture"] == "test_vit"
        ermoe.save(again, tmp_path / "second")
        assert same(again, ermoe.load(tmp_path / "second"), 96)

    def test_features_of_what_local_dir_gives(self, tmp_path):
        model, size = sparse_model("test_vit")
        ermoe.save(model, tmp_path / "whole")
        features = timm.create_model(f"local-dir:{tmp_path / 'whole'}", pretrained=True, features_only=True).eval()
        ermoe.save(features, tmp_path / "features")
        again = timm.create_model(f"local-dir:{tmp_path / 'features'}", pretrained=True).eval()
        with torch.no_grad():
            expected = model.eval().forward_intermediates(photographs(size), intermediates_only=True)[-1]
            for module in (features, again, ermoe.load(tmp_path / "features").eval()):
                assert torch.equal(module(photographs(size))[-1], expected)

    def test_every_small_name_that_timm_lists_can_be_created(self):
        names = [name for name in timm.list_models("*ermoe*") if "_vit_" not in name]
        assert "ermoe_upcycled" in names
        for name in names:
            assert timm.create_model(name, num_classes=3).sparsity.num_experts == 4


class TestWhatCannotBeWritten:
    def test_a_model_that_timm_did_not_create(self):
        from timm.models.vision_transformer import VisionTransformer

        with pytest.raises(ValueError, match=r"timm\.create_model"):
            describe(ermoe.upcycle(VisionTransformer(depth=2, embed_dim=48, num_heads=4)))

    def test_an_option_that_is_no_plain_value(self, tmp_path):
        sparse = ermoe.upcycle(build("test_vit")[0], weight_floor=Fraction(1, 1000))
        with pytest.raises(ValueError, match=r"cannot be written to config\.json"):
            ermoe.save(sparse, tmp_path)
        assert os.listdir(tmp_path) == []

    def test_a_file_where_the_folder_should_be(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="is a file: name a folder"):
            ermoe.save(sparse_model("test_vit")[0], tmp_path / "file")


class TestDamage:
    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("whole")
        ermoe.save(sparse_model("test_vit")[0], folder)
        return folder

    @pytest.fixture
    def saved(self, whole, tmp_path):
        return shutil.copytree(whole, tmp_path, dirs_exist_ok=True)

    def refuses(self, folder, message):
        with pytest.raises(ermoe.errors.UserError, match=message) as caught:
            ermoe.load(folder)
        assert "\n" not in str(caught.value)

    def test_truncated_weights(self, saved):
        weights = saved / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        self.refuses(saved, r"model\.safetensors is damaged")

    def test_corrupted_weights(self, saved):
        (saved / "model.safetensors").write_bytes(b"\xff" * 1000)
        self.refuses(saved, r"model\.safetensors is damaged")

    def test_empty_weights(self, saved):
        (saved / "model.safetensors").write_bytes(b"")
        self.refuses(saved, r"model\.safetensors is damaged")

    def test_missing_weights(self, saved):
        (saved / "model.safetensors").unlink()
        self.refuses(saved, r"model\.safetensors is not a file")

    def test_weights_of_another_architecture(self, saved):
        state = load_file(saved / "model.safetensors")
        del state["blocks.1.mlp.experts.up.U"]
        state["blocks.0.attn.qkv.weight"] = torch.zeros(3, 3)
        state["blocks.9.norm1.weight"] = torch.zeros(3)
        save_file(state, saved / "model.safetensors")
        self.refuses(
            saved,
            r"wrong shape blocks\.0\.attn\.qkv\.weight \(3, 3\) instead of \(192, 64\); "
            r"missing blocks\.1\.mlp\.experts\.up\.U; unexpected blocks\.9\.norm1\.weight",
        )

    def test_weights_of_another_save(self, saved, tmp_path):
        other = tmp_path / "other"
        ermoe.save(sparse_model("test_vit")[0], other)
        os.replace(other / "model.safetensors", saved / "model.safetensors")
        self.refuses(saved, "two different saves")

    def test_no_config(self, saved):
        (saved / "config.json").unlink()
        self.refuses(saved, r"config\.json is missing")

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ermoe": {}}', '{"ermoe": 3}', "[" * 100_000])
    def test_a_damaged_config(self, saved, text):
        (saved / "config.json").write_text(text)
        self.refuses(saved, r"config\.json is damaged")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"family": "os"}, "unknown backbone family 'os'"),
            ({"dense": {"architecture": "vit_of_nowhere", "args": {}}}, "cannot be built"),
            ({"dense": {"architecture": "test_vit", "args": {"checkpoint_path": "/etc/passwd"}}}, "may not set"),
            ({"dense": {"architecture": "test_vit", "args": {"wings": 2}}}, "cannot be built"),
            ({"dense": {"architecture": "test_vit", "args": {"num_heads": 0}}}, "cannot be built"),
            ({"dense": {"architecture": "test_vit", "args": {"num_heads": 5}}}, "cannot be built"),
            ({"dense": {"architecture": "test_vit", "args": {"patch_size": [0, 0]}}}, "cannot be built"),
            ({"dense": {"architecture": "hf-hub:owner/name", "args": {}}}, "address of another model"),
            ({"dense": {"architecture": "local-dir:/elsewhere", "args": {}}}, "address of another model"),
            ({"dense": {"architecture": 3, "args": {}}}, "cannot be built"),
            ({"sparsity": {"router": "dice"}}, "router='dice'"),
        ],
    )
    def test_a_config_of_something_else(self, saved, change, message):
        config = json.loads((saved / "config.json").read_text())
        config["ermoe"] |= change
        (saved / "config.json").write_text(json.dumps(config))
        self.refuses(saved, message)

    def test_a_precision_that_weights_cannot_have(self, saved):
        config = json.loads((saved / "config.json").read_text())
        for name in ("complex64", "int8", "save", "float31"):
            (saved / "config.json").write_text(json.dumps({**config, "dtype": name}))
            self.refuses(saved, "float32, float16 or bfloat16|cannot be built")

    @pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
    def test_attention_from_a_repository(self, key, tmp_path):
        ermoe.save(build("hugging face")[0], tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        for value in ("owner/kernel", {"": "owner/kernel"}):
            config["ermoe"]["dense"]["config"][key] = value
            (tmp_path / "config.json").write_text(json.dumps(config))
            self.refuses(tmp_path, "attn_implementation='owner/kernel': write 'eager' or 'sdpa'")

    def test_a_library_of_another_version(self, saved, monkeypatch):
        adapters = dict.fromkeys(ermoe.models.backbones.FAMILIES, "ermoe.models.families.of_old.timm_vit")
        monkeypatch.setattr(ermoe.models.backbones, "FAMILIES", adapters)
        self.refuses(saved, "this version of .* is not one ermoe knows")

    @pytest.mark.parametrize("values", [[], [0.3, 1.0], [1.5], [0.3, -1.0, 8.0], [0.3, 1.0, 0.0], [1j]])
    def test_settings_that_no_router_has(self, saved, values):
        state = load_file(saved / "model.safetensors")
        state["blocks.1.mlp.router._extra_state"] = torch.tensor(values)
        save_file(state, saved / "model.safetensors")
        self.refuses(saved, r"model\.safetensors does not fit")

    def test_neither_folder_nor_hub(self, tmp_path):
        self.refuses(tmp_path / "nothing", "no folder")
        self.refuses("./nothing", "no folder")

    def test_an_unreachable_hub(self, monkeypatch):
        def unreachable(*args, **kwargs):
            raise ConnectionError("no route")

        monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
        self.refuses("owner/name", "neither a folder here nor a repository")

    def test_a_hub_repository(self, saved, monkeypatch):
        asked = {}
        monkeypatch.setattr(
            "huggingface_hub.snapshot_download", lambda name, **options: asked.update(options, name=name) or saved
        )
        ermoe.load("owner/name@v2")
        assert (asked["name"], asked["revision"]) == ("owner/name", "v2")


class TestInterruption:
    def test_between_the_two_files(self, tmp_path, monkeypatch):
        """Both are whole, but of two saves, and that is said."""
        ermoe.save(sparse_model("test_vit")[0], tmp_path)
        replace = os.replace

        def only_weights(source, target):
            if Path(target).name == "config.json":
                raise InterruptedError
            replace(source, target)

        monkeypatch.setattr(os, "replace", only_weights)
        with pytest.raises(InterruptedError):
            ermoe.save(sparse_model("test_vit", "merged")[0], tmp_path)
        monkeypatch.undo()
        with pytest.raises(ermoe.errors.UserError, match="two different saves"):
            ermoe.load(tmp_path)

    def test_a_failed_save_leaves_the_earlier_one(self, tmp_path, monkeypatch):
        model, size = sparse_model("test_vit")
        ermoe.save(model, tmp_path)

        def half_a_file(state, path, metadata):
            Path(path).write_bytes(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(io, "save_file", half_a_file)
        with pytest.raises(OSError, match="disk full"):
            ermoe.save(sparse_model("test_vit", "merged")[0], tmp_path)
        monkeypatch.undo()
        assert same(model, ermoe.load(tmp_path), size)
        assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]

    def test_a_killed_save_leaves_the_earlier_one(self, tmp_path, monkeypatch):
        """The process ends in the middle of writing the weights."""
        model, size = sparse_model("test_vit")
        ermoe.save(model, tmp_path)

        def killed(state, path, metadata):
            Path(path).write_bytes(b"half")
            os._exit(9)

        monkeypatch.setattr(io, "save_file", killed)
        child = os.fork()
        if not child:
            try:
                ermoe.save(sparse_model("test_vit", "merged")[0], tmp_path)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert same(model, ermoe.load(tmp_path), size)


class TestSeveralFiles:
    """Weights that are larger than one file should be come as Hugging Face has them."""

    def test_they_are_read_as_one_model(self, tmp_path):
        model = ermoe.load(saves.classifier(tmp_path / "one"))
        io.save_state(model, model.state_dict(), tmp_path / "several", largest_file=20_000)
        files = sorted(path.name for path in (tmp_path / "several").iterdir())
        assert files[:2] == ["config.json", f"model-00001-of-{len(files) - 2:05d}.safetensors"]
        assert files[-1] == "model.safetensors.index.json"
        assert all((tmp_path / "several" / name).stat().st_size < 25_000 for name in files)
        again = ermoe.load(tmp_path / "several").state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())

    def test_a_save_in_fewer_files_leaves_none_of_the_others(self, tmp_path):
        model = ermoe.load(saves.classifier(tmp_path))
        io.save_state(model, model.state_dict(), tmp_path, largest_file=20_000)
        assert not (tmp_path / "model.safetensors").exists()
        ermoe.save(model, tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]

    def test_files_of_two_saves_are_refused(self, tmp_path):
        model = ermoe.load(saves.classifier(tmp_path / "a"))
        for name in "ab":
            io.save_state(model, model.state_dict(), tmp_path / name, largest_file=20_000)
        first = next((tmp_path / "a").glob("model-00002*"))
        shutil.copy(tmp_path / "b" / first.name, first)
        with pytest.raises(UserError, match=f"{first.name} come from two different saves"):
            ermoe.load(tmp_path / "a")

    def test_a_model_without_its_weights_says_how_others_are_written(self, tmp_path):
        model = ermoe.load(saves.classifier(tmp_path / "a"))
        skeleton = io.weightless_copy(model)
        assert all(parameter.is_meta for parameter in skeleton.parameters())
        io.save_state(skeleton, model.state_dict(), tmp_path / "b")
        again = ermoe.load(tmp_path / "b").state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
