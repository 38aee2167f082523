"""Other people's checkpoint files, from local disk."""

import pickle

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

import ermoe
from ermoe.models.weights.stored import read_checkpoint
from support.backbones import build, distance, hugging_face, outputs, perturb, photographs

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2}


def vit(**options):
    torch.manual_seed(1)
    return timm.create_model("vit_tiny_patch16_224", **{**SHAPE, "num_classes": 10, **options}).eval()


@pytest.fixture
def torchvision_file(tmp_path):
    model = perturb(torchvision.models.VisionTransformer(32, 8, 4, 4, 64, 128, num_classes=10)).eval()
    torch.save(model.state_dict(), tmp_path / "torchvision.pth")
    return model, tmp_path / "torchvision.pth"


class TestDialects:
    def test_torchvision(self, torchvision_file):
        theirs, file = torchvision_file
        ours = vit()
        fit = ermoe.load_weights(ours, file)
        assert fit.missing == fit.unexpected == fit.resized == ()
        assert distance(outputs(ours, photographs(32)), outputs(theirs, photographs(32))) < 1e-4

    def test_torchvision_before_2022(self, torchvision_file, tmp_path):
        theirs, file = torchvision_file
        state = torch.load(file, weights_only=True)
        old = {
            name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): t for name, t in state.items()
        }
        torch.save(old, tmp_path / "old.pth")
        ours = vit()
        ermoe.load_weights(ours, tmp_path / "old.pth")
        assert distance(outputs(ours, photographs(32)), outputs(theirs, photographs(32))) < 1e-4

    def test_hugging_face(self, tmp_path):
        theirs = perturb(hugging_face(layer_norm_eps=1e-6)).eval()
        theirs.save_pretrained(tmp_path)
        ours = vit()
        ermoe.load_weights(ours, tmp_path / "model.safetensors")
        assert distance(outputs(ours, photographs(32)), outputs(theirs, photographs(32))) < 1e-4

    def test_hugging_face_by_its_names_in_memory(self, tmp_path):
        theirs = perturb(hugging_face(layer_norm_eps=1e-6)).eval()
        save_file(theirs.state_dict(), tmp_path / "model.safetensors")
        ours = vit()
        ermoe.load_weights(ours, tmp_path / "model.safetensors")
        assert distance(outputs(ours, photographs(32)), outputs(theirs, photographs(32))) < 1e-4

    def test_google(self, tmp_path):
        """timm's own reader of these files is the reference."""
        file = google_file(tmp_path / "vit.npz")
        ours, reference = vit(), vit()
        reference.load_pretrained(str(file))
        fit = ermoe.load_weights(ours, file)
        assert fit.missing == fit.unexpected == ()
        for name, tensor in reference.state_dict().items():
            assert torch.equal(ours.state_dict()[name], tensor), name

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
    def test_timm(self, suffix, tmp_path):
        theirs = perturb(vit())
        file = tmp_path / f"timm{suffix}"
        save_file(theirs.state_dict(), file) if suffix == ".safetensors" else torch.save(theirs.state_dict(), file)
        ours = vit()
        ermoe.load_weights(ours, file)
        assert torch.equal(outputs(ours, photographs(32)), outputs(theirs, photographs(32)))

    def test_wrapped_by_a_training_script(self, tmp_path):
        theirs = perturb(vit())
        state = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
        torch.save({"epoch": 3, "model": state, "lr": 0.1}, tmp_path / "run.pth")
        ours = vit()
        ermoe.load_weights(ours, tmp_path / "run.pth")
        assert torch.equal(outputs(ours, photographs(32)), outputs(theirs, photographs(32)))

    @pytest.mark.parametrize("name", ["torchvision", "hugging face", "eva02_tiny_patch14_224"])
    def test_other_backbones_take_their_own_files(self, name, tmp_path):
        theirs, size = build(name)
        torch.save(theirs.state_dict(), tmp_path / "own.pth")
        ours = perturb(build(name)[0], seed=5)
        ermoe.load_weights(ours, tmp_path / "own.pth")
        assert torch.equal(outputs(ours, photographs(size)), outputs(theirs, photographs(size)))


class TestSizes:
    def test_positions_are_resized_as_timm_resizes_them(self, torchvision_file):
        _, file = torchvision_file
        ours = vit(img_size=48)
        assert ermoe.load_weights(ours, file).resized == ("pos_embed",)
        same_size = vit()
        ermoe.load_weights(same_size, file)
        same_size.set_input_size(img_size=(48, 48))
        assert torch.allclose(ours.pos_embed, same_size.pos_embed, atol=1e-6)

    def test_patch_filters_are_resized(self, torchvision_file):
        ours = vit(patch_size=4, img_size=16)
        assert ermoe.load_weights(ours, torchvision_file[1]).resized == ("patch_embed.proj.weight",)

    def test_another_head_is_an_error_that_says_so(self, torchvision_file):
        with pytest.raises(ValueError, match=r"wrong shape head\.bias.*\(10,\) instead of \(3,\)|head\.weight"):
            ermoe.load_weights(vit(num_classes=3), torchvision_file[1])

    def test_or_is_left_out_on_request(self, torchvision_file):
        ours = vit(num_classes=3)
        fit = ermoe.load_weights(ours, torchvision_file[1], strict=False)
        assert fit.missing == fit.unexpected == ("head.bias", "head.weight")
        assert torch.equal(ours.blocks[0].mlp.fc1.weight, torchvision_file[0].encoder.layers[0].mlp[0].weight)

    def test_another_depth_lists_what_is_missing(self, torchvision_file):
        with pytest.raises(ValueError, match=r"missing blocks\.4\.attn\.proj\.bias.* and \d+ more"):
            ermoe.load_weights(vit(depth=6), torchvision_file[1])

    def test_a_sparse_model_wants_its_dense_weights_first(self, torchvision_file):
        with pytest.raises(ValueError, match="dense model first"):
            ermoe.load_weights(ermoe.upcycle(vit()), torchvision_file[1])

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("pos_embed", (64,)),
            ("pos_embed", (1, 1, 64)),
            ("pos_embed", (1, 11, 64)),
            ("pos_embed", (2, 50, 64)),
            ("patch_embed.proj.weight", (64,)),
            ("patch_embed.proj.weight", (64, 3, 0, 0)),
        ],
    )
    def test_what_cannot_be_resized_is_of_the_wrong_shape(self, name, shape, tmp_path):
        torch.save({**vit().state_dict(), name: torch.ones(shape)}, tmp_path / "odd.pth")
        with pytest.raises(ermoe.errors.UserError, match=rf"wrong shape {name} \({shape[0]},.*instead of"):
            ermoe.load_weights(vit(), tmp_path / "odd.pth")

    @pytest.mark.parametrize("name", ["head.weight", "pos_embed"])
    def test_complex_weights_are_of_the_wrong_type(self, name, tmp_path):
        state = vit(img_size=48).state_dict()
        torch.save({**state, name: state[name].to(torch.complex64)}, tmp_path / "complex.pth")
        with pytest.raises(ermoe.errors.UserError, match=rf"wrong (type|shape) {name}"):
            ermoe.load_weights(vit(), tmp_path / "complex.pth")
        fit = ermoe.load_weights(vit(), tmp_path / "complex.pth", strict=False)
        assert name in fit.missing

    def test_names_are_listed_in_the_order_of_the_model(self, tmp_path):
        torch.save({name: torch.ones(7) for name in vit().state_dict()}, tmp_path / "all.pth")
        first = r"wrong shape cls_token .*pos_embed .*patch_embed\.proj\.weight .*blocks\.0\.norm1\.weight"
        with pytest.raises(ermoe.errors.UserError, match=first):
            ermoe.load_weights(vit(), tmp_path / "all.pth")


class TestDamage:
    @pytest.mark.parametrize("kind", ["npz", "torch", "old torch", "safetensors"])
    def test_bytes_turned_over_anywhere(self, kind, tmp_path):
        """Whatever the readers of other libraries raise, it becomes one sentence; or the file is still one."""
        state = {f"layer.{i}.weight": torch.arange(9.0).view(3, 3) for i in range(3)}
        file = tmp_path / {"npz": "a.npz", "safetensors": "a.safetensors"}.get(kind, "a.pth")
        if kind == "npz":
            np.savez_compressed(file, **{name: tensor.numpy() for name, tensor in state.items()})
        elif kind == "safetensors":
            save_file(state, file)
        else:
            torch.save(state, file, _use_new_zipfile_serialization=kind == "torch")
        whole, sentences = file.read_bytes(), []
        for position in range(0, len(whole), 1 + len(whole) // 120):
            file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
            try:
                read_checkpoint(file)
            except ermoe.errors.UserError as problem:
                sentences.append(str(problem))
        assert len(sentences) > 10
        assert not any("\n" in sentence for sentence in sentences)

    def test_a_dictionary_that_holds_itself(self, tmp_path):
        endless = {}
        endless["model"] = endless
        torch.save(endless, tmp_path / "endless.pth")
        with pytest.raises(ermoe.errors.UserError, match="holds no weights"):
            read_checkpoint(tmp_path / "endless.pth")

    def test_tensors_without_plain_values(self, tmp_path):
        for odd in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
            torch.save({"weight": odd}, tmp_path / "odd.pth")
            with pytest.raises(ermoe.errors.UserError, match="holds weight as a sparse, quantised or empty tensor"):
                read_checkpoint(tmp_path / "odd.pth")

    @pytest.mark.parametrize(
        "name",
        [
            "embedding/kernel",
            "head/kernel",
            "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel",
            "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/out/kernel",
            "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/value/bias",
        ],
    )
    def test_a_kernel_with_other_axes(self, name, tmp_path):
        state = dict(np.load(google_file(tmp_path / "vit.npz")))
        np.savez(tmp_path / "odd.npz", **{**state, name: np.ones(5, np.float32)})
        with pytest.raises(ermoe.errors.UserError, match=rf"{name} has shape \(5,\): need \d axes"):
            ermoe.load_weights(vit(), tmp_path / "odd.npz")

    def test_queries_of_another_shape_than_keys(self, tmp_path):
        state = dict(np.load(google_file(tmp_path / "vit.npz")))
        name = "Transformer/encoderblock_2/MultiHeadDotProductAttention_1/key/kernel"
        np.savez(tmp_path / "odd.npz", **{**state, name: np.ones((32, 4, 16), np.float32)})
        with pytest.raises(ermoe.errors.UserError, match="of different shapes"):
            ermoe.load_weights(vit(), tmp_path / "odd.npz")

    @pytest.mark.parametrize("suffix", [".pth", ".npz", ".safetensors"])
    @pytest.mark.parametrize("content", [b"", b"nonsense" * 50])
    def test_it_is_said_in_one_sentence(self, suffix, content, tmp_path):
        file = tmp_path / f"weights{suffix}"
        file.write_bytes(content)
        with pytest.raises(ermoe.errors.UserError, match=r"weights\S+ (is damaged|holds)") as caught:
            read_checkpoint(file)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("suffix", [".pth", ".npz"])
    def test_a_truncated_file(self, suffix, tmp_path):
        file = tmp_path / f"weights{suffix}"
        google_file(file) if suffix == ".npz" else torch.save(vit().state_dict(), file)
        file.write_bytes(file.read_bytes()[:-2000])
        with pytest.raises(ermoe.errors.UserError, match="is damaged"):
            read_checkpoint(file)

    def test_nothing_is_unpickled(self, tmp_path):
        class Trap:
            def __reduce__(self):
                return (open, (str(tmp_path / "sprung"), "w"))

        with open(tmp_path / "trap.pth", "wb") as file:
            pickle.dump({"weight": Trap()}, file)
        torch.save({"model": Trap()}, tmp_path / "trap2.pth")
        np.savez(tmp_path / "trap.npz", weight=np.array([Trap()], dtype=object))
        for name in ("trap.pth", "trap2.pth", "trap.npz"):
            with pytest.raises(ermoe.errors.UserError, match=r"does not unpickle|is damaged"):
                read_checkpoint(tmp_path / name)
        assert not (tmp_path / "sprung").exists()

    def test_no_weights_in_it(self, tmp_path):
        torch.save({"epoch": 3}, tmp_path / "run.pth")
        with pytest.raises(ermoe.errors.UserError, match="holds no weights"):
            read_checkpoint(tmp_path / "run.pth")

    def test_no_file(self, tmp_path):
        with pytest.raises(ermoe.errors.UserError, match="is not a file"):
            read_checkpoint(tmp_path / "nothing.pth")

    def test_queries_without_keys(self, tmp_path):
        state = dict(np.load(google_file(tmp_path / "vit.npz")))
        del state["Transformer/encoderblock_2/MultiHeadDotProductAttention_1/key/kernel"]
        np.savez(tmp_path / "part.npz", **state)
        with pytest.raises(ermoe.errors.UserError, match="incomplete"):
            ermoe.load_weights(vit(), tmp_path / "part.npz")


def google_file(path, dim=64, hidden=128, heads=4, depth=4, patch=8, tokens=17, classes=10):
    """A checkpoint with Flax's names and axes, as in Google's public releases of ViT."""
    generator = np.random.default_rng(0)

    def array(*shape):
        return generator.normal(size=shape).astype(np.float32)

    state = {
        "cls": array(1, 1, dim),
        "embedding/kernel": array(patch, patch, 3, dim),
        "embedding/bias": array(dim),
        "Transformer/posembed_input/pos_embedding": array(1, tokens, dim),
        "Transformer/encoder_norm/scale": array(dim),
        "Transformer/encoder_norm/bias": array(dim),
        "head/kernel": array(dim, classes),
        "head/bias": array(classes),
        "pre_logits/kernel": array(dim, dim),
        "pre_logits/bias": array(dim),
    }
    for layer in range(depth):
        block = f"Transformer/encoderblock_{layer}"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            state |= {f"{block}/{norm}/scale": array(dim), f"{block}/{norm}/bias": array(dim)}
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            state[f"{attention}/{part}/kernel"] = array(dim, heads, dim // heads)
            state[f"{attention}/{part}/bias"] = array(heads, dim // heads)
        state |= {f"{attention}/out/kernel": array(heads, dim // heads, dim), f"{attention}/out/bias": array(dim)}
        mlp = f"{block}/MlpBlock_3"
        state |= {f"{mlp}/Dense_0/kernel": array(dim, hidden), f"{mlp}/Dense_0/bias": array(hidden)}
        state |= {f"{mlp}/Dense_1/kernel": array(hidden, dim), f"{mlp}/Dense_1/bias": array(dim)}
    np.savez(path, **state)
    return path
