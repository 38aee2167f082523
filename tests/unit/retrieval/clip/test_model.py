"""A CLIP whose image tower becomes sparse: same outputs, saved and loaded, frozen text, trained-on ids."""

import copy

import open_clip
import pytest
import timm
import torch

import ermoe
from ermoe.errors import UserError
from ermoe.models.backbones import SparseBlock
from ermoe.retrieval.clip.model import CLIP, create_clip
from ermoe.retrieval.clip.registry import register_with_open_clip
from ermoe.retrieval.clip.towers import END, tokenise, trim
from ermoe.retrieval.presets import TextShape

TEXT = TextShape(context_length=12, width=32, heads=2, layers=2)
IMAGE = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}


@pytest.fixture
def clip():
    return create_clip("vit_tiny_patch16_224", TEXT, embed_dim=24, seed=1, image_args=IMAGE).eval()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    texts = tokenise(["a dog", "two cats on a red sofa", "a boat"], 12).id_TL.long()
    return torch.randn(3, 3, 32, 32, generator=generator), texts


def test_it_is_open_clips_model_with_open_clips_names(clip, batch):
    assert isinstance(clip, open_clip.CustomTextCLIP)
    image, text = batch
    features = clip(image, text)
    assert [tuple(part.shape) for part in features] == [(3, 24), (3, 24), (1,)]
    torch.testing.assert_close(features[0].norm(dim=-1), torch.ones(3))
    torch.testing.assert_close(clip.get_logits(image, text)[0], features[2] * features[0] @ features[1].mT)
    names = set(clip.state_dict())
    assert {"visual.trunk.blocks.0.mlp.fc1.weight", "visual.head.proj.weight", "text.text_projection"} <= names
    assert clip(image)[1] is None
    assert clip(text=text)[0] is None


def test_the_text_tower_equals_open_clips_own_and_does_not_see_padding(clip, batch):
    twin = open_clip.transformer.TextTransformer(
        context_length=12, vocab_size=49408, width=32, heads=2, layers=2, output_dim=24
    )
    twin.load_state_dict(clip.text.state_dict())
    whole = twin.eval()(batch[1])
    torch.testing.assert_close(clip.encode_text(batch[1]), whole)
    torch.testing.assert_close(clip.encode_text(trim(batch[1])), whole, atol=1e-6, rtol=0)
    assert trim(batch[1]).shape[1] == 8
    with pytest.raises(UserError, match="13 tokens does not fit"):
        clip.encode_text(torch.ones(1, 13, dtype=torch.long))


def test_upcycling_makes_the_image_tower_sparse_and_keeps_its_outputs(clip, batch):
    sparse = ermoe.upcycle(clip, num_experts=4)
    assert [name for name, module in sparse.named_modules() if isinstance(module, SparseBlock)] == [
        "visual.trunk.blocks.1",
        "visual.trunk.blocks.3",
    ]
    assert not any(isinstance(module, SparseBlock) for module in clip.modules())
    torch.testing.assert_close(sparse(*batch)[0], clip(*batch)[0], atol=1e-5, rtol=0)
    exempt = sparse.no_weight_decay()
    assert {"visual.trunk.pos_embed", "text.positional_embedding"} <= exempt
    assert {name for name in sparse.state_dict() if name.endswith(("mlp.experts.up.U", "mlp.experts.up.s"))} <= exempt


@pytest.mark.parametrize("options", [None, {"num_experts": 4}, {"router": "v-moe", "num_experts": 4}])
def test_saved_and_loaded_it_is_the_same(clip, batch, options, tmp_path):
    model = clip if options is None else ermoe.upcycle(clip, **options).eval()
    model.remember(["coco:1", "coco:2"])
    ermoe.save(model, tmp_path)
    again = ermoe.load(tmp_path).eval()
    assert isinstance(again, CLIP)
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(again.state_dict()[name], tensor), name
    for mine, theirs in zip(model(*batch), again(*batch), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(again.trained_on, model.trained_on)
    assert len(again.trained_on) == 2


def test_freezing_the_text_tower_stops_everything_that_could_move_it(clip, batch):
    clip.freeze_text()
    clip.train()
    assert clip.text_is_frozen
    assert not clip.text.training
    assert clip.visual.training
    before = copy.deepcopy(clip.text.state_dict())
    optimizer = torch.optim.AdamW([p for p in clip.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        image, text, scale = clip(*batch)
        (scale * image @ text.mT).logsumexp(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in clip.text.state_dict().items():
        assert tensor.numpy().tobytes() == before[name].numpy().tobytes(), name


def test_it_remembers_what_it_was_trained_on(clip):
    clip.remember(["b", "a"])
    first = clip.trained_on.clone()
    clip.remember(["a", "c"])
    assert len(clip.trained_on) == 3
    assert set(first.tolist()) <= set(clip.trained_on.tolist())
    clip.logit_scale.data.fill_(9.0)
    clip.limit_scale()
    assert clip.logit_scale.exp().item() == pytest.approx(100)


def test_tokens_are_cut_before_the_end_token_and_counted():
    tokens = tokenise(["word " * 30, "a dog"], 12)
    assert tokens.num_cut == 1
    assert tokens.id_TL[0, -1] == END
    assert torch.equal(tokens.id_TL.long(), open_clip.tokenize(["word " * 30, "a dog"], 12))
    assert tokenise([], 12).id_TL.shape == (0, 12)


def test_open_clip_creates_ermoe_towers_by_name():
    assert "ERMoE-B-16" in register_with_open_clip()
    assert register_with_open_clip() == register_with_open_clip()
    model = open_clip.create_model("ERMoE-Ti-16").eval()
    assert sum(isinstance(module, SparseBlock) for module in model.visual.modules()) == 6
    with torch.inference_mode():
        image, text, _ = model(torch.randn(1, 3, 224, 224), open_clip.tokenize(["a dog"]))
    assert image.shape == text.shape == (1, 256)


def test_what_cannot_be_is_refused(clip, tmp_path):
    with pytest.raises(UserError, match="has a classifier for 1000 classes"):
        CLIP(timm.create_model("test_vit"), TEXT)
    with pytest.raises(UserError, match="heads=3 do not divide width=32"):
        TextShape(width=32, heads=3)
    with pytest.raises(UserError, match="need at least 1"):
        TextShape(layers=0)
    with pytest.raises(UserError, match="share between 0 and 1"), clip.visual.dropping_patches(1.0):
        pass
    sparse = CLIP(timm.create_model("test_ermoe_vit", num_classes=0), TEXT, 24)
    with pytest.raises(UserError, match="sparse by its name"):
        ermoe.save(sparse, tmp_path)
