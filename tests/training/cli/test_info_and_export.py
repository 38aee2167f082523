"""``ermoe info`` and ``ermoe export`` as a person types them."""

import timm
import torch

import ermoe
from ermoe.brain.rivals.sfcn import SFCN
from ermoe.cli.main import main


def test_info_prints_the_paper_beside_the_count(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["info", "paper-b16"]) == 0
    printed = capsys.readouterr().out
    for expected in ("244.3 M", "243.0 M", "106.3 M", "113.2 M", "routing", "context", "341.6 M", "1.25 ×", "0.82 ×"):
        assert expected in printed
    assert "fit neither" in printed


def test_info_of_a_small_preset(capsys):
    assert main(["info", "tiny-ti16"]) == 0
    assert "21.7 M" in capsys.readouterr().out


def test_info_of_a_saved_model(tmp_path, capsys):
    ermoe.save(ermoe.upcycle(timm.create_model("test_vit"), num_experts=2), tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    assert "0.5 M" in capsys.readouterr().out


def test_info_and_export_take_a_run(tmp_path, capsys):
    small = timm.create_model("test_vit", img_size=16, patch_size=8, depth=2, num_classes=2)
    ermoe.save(ermoe.upcycle(small, num_experts=2), tmp_path / "run" / "model")
    (tmp_path / "run" / "config.json").write_text("{}")
    assert main(["info", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "multiply-adds" in shown
    assert "0.00" not in shown
    assert main(["export", str(tmp_path / "run"), "--to", "torch", "--fixed-batch", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "model.pt2").is_file()


def test_info_of_a_saved_network_without_blocks(tmp_path, capsys):
    ermoe.save(SFCN(channels=(4, 4, 4)), tmp_path)
    assert main(["info", str(tmp_path)]) == 2
    assert "this SFCN has no transformer blocks" in capsys.readouterr().err


def test_info_of_nothing(capsys):
    assert main(["info", "paper-z16"]) == 2
    assert "there is no preset 'paper-z16'" in capsys.readouterr().err


def test_export_writes_a_file_beside_the_model(tmp_path, capsys):
    model = ermoe.upcycle(timm.create_model("test_vit", img_size=32, depth=2), num_experts=2)
    ermoe.save(model, tmp_path)
    assert main(["export", str(tmp_path), "--to", "torch", "--fixed-batch"]) == 0
    assert "model.pt2: outputs differ" in capsys.readouterr().out
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(
            torch.export.load(tmp_path / "model.pt2").module()(images), model.eval()(images), atol=1e-5
        )


def test_export_at_a_size_the_model_does_not_take(tmp_path, capsys):
    ermoe.save(ermoe.upcycle(timm.create_model("test_vit", img_size=32, depth=2), num_experts=2), tmp_path)
    assert main(["export", str(tmp_path), "--image-size", "50"]) == 2
    assert "image_size=(50, 50): this VisionTransformer does not take such images" in capsys.readouterr().err


def test_export_of_nothing(tmp_path, capsys):
    assert main(["export", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_export_to_a_name_of_another_format(tmp_path, capsys):
    assert main(["export", str(tmp_path), "--to", "onnx", "--out", "model.pt2"]) == 2
    assert "ends in .onnx" in capsys.readouterr().err
