"""Brains in the explorer: the experts of a scan's cubes, its tissues, and its age as it changes when cubes are hidden.

Letters: X, Y, Z voxels, x, y, z cubes, S = x·y·z of them, E experts, K shuffles, B of the same scan at a time.
"""

from __future__ import annotations

import base64
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from ermoe._version import __version__
from ermoe.analysis.plots import expert_colours
from ermoe.brain.data.scans import TISSUES, Scan
from ermoe.brain.estimation import in_voxels
from ermoe.brain.model import BrainAgeModel, predict
from ermoe.errors import UserError
from ermoe.explorer.cubes import Cubes, cubes_of, edge_of, grey, layers_of, tissue_sums
from ermoe.explorer.inspection import short
from ermoe.explorer.look import Change
from ermoe.explorer.server import Desk, change_of, object_of, whole_number
from ermoe.nn import moe_layers

_KEPT, _AT_ONCE = 4, 8
_OVERLAYS = ("experts", "tissue", "occlusion")


@dataclass(slots=True)
class _Brain:
    """One scan, ready: its cubes, its age, and what hiding each cube did so far.

    ``whole_F`` is what the network of each fold that may judge says of the whole scan, ``worth_F`` how much of that is
    believed.
    """

    cubes: Cubes
    age: float
    whole_F: Tensor
    worth_F: Tensor
    change_S: Tensor


class Brains(Desk):
    """Scans, and the model that tells their ages."""

    page = "brain.html"

    def __init__(self, name: str, model: BrainAgeModel, scans: Sequence[Scan], *, command: str = "") -> None:
        super().__init__()
        self.name, self.model, self.scans, self.command = name, model, list(scans), command
        self.edge = edge_of(model)
        if not any(moe_layers(network) for network in model.networks.values()):
            raise UserError(
                f"{name} has no mixture-of-experts layer to explore: train a preset with experts, such as small-ermoe"
            )
        self._brains: OrderedDict[int, _Brain] = OrderedDict()

    @property
    def summary(self) -> str:
        """What there is to see."""
        return f"{len(self.scans)} scans"

    def routes(self) -> list[Route]:
        return [
            Route("/api/setup", self.setup),
            Route("/api/brain", self.brain, methods=["POST"]),
            Route("/api/hide", self.hide, methods=["POST"]),
            Route("/api/occlude", self.occlude, methods=["POST"]),
            Route("/api/view", self.view),
        ]

    async def setup(self, request: Request) -> Response:
        """Everything the page must know before it shows anything."""
        scans = [{"name": scan.key, "age": scan.age, "sex": scan.sex} for scan in self.scans]
        network = next(iter(self.model.networks.values()))
        layers: list[dict[str, Any]] = [
            {"name": short(name), "experts": own.experts.num_experts} for name, own in moe_layers(network).items()
        ]
        colours = expert_colours(max(layer["experts"] for layer in layers))
        told = {"version": __version__, "name": self.name, "command": self.command, "scans": scans, "layers": layers}
        return JSONResponse({**told, "colours": colours, "tissues": list(TISSUES)})

    async def brain(self, request: Request) -> Response:
        """A scan with everything about its cubes."""
        asked = await object_of(request)
        number, change = self._number(asked.get("scan")), change_of(asked)
        return JSONResponse(await self.compute(partial(self._told, number, change)))

    async def hide(self, request: Request) -> Response:
        """The age without some cubes."""
        asked = await object_of(request)
        number, cubes = self._number(asked.get("scan")), asked.get("cubes")
        if not isinstance(cubes, list) or len(cubes) > 10_000:
            raise UserError("cubes: need a list of their numbers")
        hidden = [whole_number(cube, "cubes") for cube in cubes]
        return JSONResponse({"age": await self.compute(lambda: float(self._without(self._get(number), [hidden])[0]))})

    async def occlude(self, request: Request) -> Response:
        """Hides the next few cubes, one at a time; the page asks again until all are known."""
        number = self._number((await object_of(request)).get("scan"))

        def go_on() -> dict[str, Any]:
            brain = self._get(number)
            real_S = brain.cubes.real_S
            open_S = real_S & brain.change_S.isnan()
            some = open_S.nonzero().flatten()[:_AT_ONCE].tolist()
            if some:
                brain.change_S[some] = self._without(brain, [[cube] for cube in some]) - brain.age
            change = [None if math.isnan(value) else value for value in brain.change_S.tolist()]
            return {
                "done": int(real_S.sum() - open_S.sum()) + len(some),
                "of": int(real_S.sum()),
                "change": change,
            }

        return JSONResponse(await self.compute(go_on))

    async def view(self, request: Request) -> Response:
        """nilearn's orthogonal view, a page of its own for a frame."""
        overlay = request.query_params.get("overlay", "")
        number, layer = (whole_number(request.query_params.get(name, ""), name) for name in ("scan", "layer"))
        if overlay not in _OVERLAYS:
            raise UserError(f"overlay {overlay[:20]!r}: use one of {', '.join(_OVERLAYS)}")
        page = await self.compute(partial(self._view, self._number(number), layer, overlay))
        return HTMLResponse(page, headers={"x-frame-page": "1"})

    def _number(self, value: object) -> int:
        number = whole_number(value, "scan")
        if number >= len(self.scans):
            raise UserError(f"there is no scan {number}: they go from 0 to {len(self.scans) - 1}")
        return number

    def _get(self, number: int) -> _Brain:
        """Prepared as the model's training did; the last few are kept."""
        if number not in self._brains:
            self._brains[number] = self._prepared(self.scans[number])
            while len(self._brains) > _KEPT:
                self._brains.popitem(last=False)
        return self._brains[number]

    def _prepared(self, scan: Scan) -> _Brain:
        cubes = cubes_of(scan, self.model)
        (row,) = predict(self.model, [scan], read=lambda _: cubes.volume)
        if row.problem:
            raise UserError(row.problem)
        whole_F1 = self._said(cubes, torch.ones(1, len(cubes.real_S), dtype=torch.bool))
        worth_F = torch.tensor([self.model.worth(fold, scan.participant_id) for fold in cubes.folds])
        return _Brain(cubes, row.brain_age, whole_F1[:, 0], worth_F, torch.full((len(cubes.real_S),), math.nan))

    def _without(self, brain: _Brain, hidden: Sequence[Sequence[int]]) -> Tensor:
        """Ages, one for each list of hidden cubes: age + mean over folds of worth · (network without − network with).

        A ridge measures the whole brain, whatever is hidden of the networks.
        """
        cubes = brain.cubes
        shown_BS = torch.ones(len(hidden), len(cubes.real_S), dtype=torch.bool)
        for row, own in enumerate(hidden):
            if any(cube >= len(cubes.real_S) for cube in own):
                raise UserError(f"there is no such cube: they go from 0 to {len(cubes.real_S) - 1}")
            shown_BS[row, list(own)] = False
        if not bool((shown_BS & cubes.real_S).any(1).all()):
            raise UserError("all of the brain is hidden: show some of it again")
        change_FB = self._said(cubes, shown_BS) - brain.whole_F.unsqueeze(1)
        return brain.age + (brain.worth_F.unsqueeze(1) * change_FB).mean(0)

    def _said(self, cubes: Cubes, shown_BS: Tensor) -> Tensor:
        """What each network says of the cubes that are shown, (F, B); others have no voxels, no mask, no token."""
        shown = in_voxels(shown_BS.view(-1, *cubes.grid), self.edge, cubes.mask_1xyz)
        output = self.model.outputs(cubes.input_1Cxyz * shown.unsqueeze(1), cubes.mask_1xyz & shown, cubes.folds)
        return torch.stack([self.model.head.age(output_BK).float() for output_BK in output])

    def _told(self, number: int, change: Change) -> dict[str, Any]:
        brain = self._get(number)
        cubes = brain.cubes
        layers = []
        for layer in layers_of(cubes, self.model.networks[cubes.folds[0]], change).values():
            weight_SE = layer.weight_TE
            expert_S = torch.where(weight_SE.amax(1) > 0, weight_SE.argmax(1), -1)
            score_SE = weight_SE if layer.score_TE is None else layer.score_TE
            own = {"expert": expert_S.tolist(), "score": _packed(score_SE), "weight": _packed(weight_SE)}
            layers.append({**own, "tissues": _tissues(weight_SE > 0, cubes.tissue_S3)})
        tissue_S = torch.where(cubes.real_S, cubes.tissue_S3.argmax(1), -1)
        return {
            "shape": cubes.volume.t1_XYZ.shape,
            "t1": base64.b64encode(grey(cubes.volume).tobytes()).decode("ascii"),
            "grid": cubes.grid,
            "edge": self.model.patch_size,
            "age": brain.age,
            "known": cubes.scan.age,
            "worth": float(brain.worth_F.mean()),
            "network": cubes.folds[0],
            "tissue": tissue_S.tolist(),
            "layers": layers,
        }

    def _view(self, number: int, layer: int, overlay: str) -> str:
        """nilearn's page, without the one address in it that leads elsewhere."""
        import nibabel
        from matplotlib.colors import ListedColormap
        from nilearn.plotting import view_img

        brain, told = self._get(number), self._told(number, Change())
        if overlay == "occlusion":
            value_S = brain.change_S.nan_to_num(0)
            colours: Any = "RdBu_r"
        else:
            found = told["tissue"] if overlay == "tissue" else told["layers"][layer % len(told["layers"])]["expert"]
            value_S = torch.tensor(found).float() + 1
            number_of = len(TISSUES) if overlay == "tissue" else max(found) + 1
            colours = ListedColormap(["#000000", *expert_colours(max(number_of, 1))])
        like = torch.empty(1, *told["shape"])
        value_XYZ = in_voxels(value_S.view(1, *brain.cubes.grid), self.model.patch_size, like)[0].numpy()
        value_XYZ = np.where(brain.cubes.volume.mask_XYZ, value_XYZ, 0)
        image = partial(nibabel.Nifti1Image, affine=brain.cubes.volume.affine)
        signed = overlay == "occlusion"
        shown = view_img(
            image(value_XYZ.astype(np.float32)),
            bg_img=image(np.asarray(brain.cubes.volume.t1_XYZ, np.float32)),
            cmap=colours, symmetric_cmap=signed, resampling_interpolation="nearest", opacity=0.6, colorbar=signed,
            threshold=1e-6, black_bg=True, title="",
        )  # fmt: skip
        page: str = shown.get_standalone()
        return re.sub(r"<link[^>]*>", "", page)


def _tissues(used_SE: Tensor, tissue_S3: Tensor) -> list[dict[str, list[float]]]:
    """By expert the mean tissue shares of its cubes, and the same with experts dealt out at random: mean and spread."""
    own_E3, shuffled_KE3, number_E = tissue_sums(used_SE, tissue_S3, torch.Generator().manual_seed(0))
    number_E1 = number_E.clamp_min(1).unsqueeze(1)
    own_E3, shuffled_KE3 = own_E3 / number_E1, shuffled_KE3 / number_E1
    return [
        {"own": own_3.tolist(), "shuffled": shuffled_K3.mean(0).tolist(), "sd": shuffled_K3.std(0).tolist()}
        for own_3, shuffled_K3 in zip(own_E3, shuffled_KE3.unbind(1), strict=True)
    ]


def _packed(value: Tensor) -> str:
    return base64.b64encode(value.float().contiguous().numpy().astype("<f4").tobytes()).decode("ascii")


def open_brains(folder: str, data: str | None, *, device: Any = "cpu", command: str = "") -> Brains:
    """The explorer of a brain-age model and of scans: NIfTI files, folders, or BIDS roots."""
    from ermoe.brain.data.cohort import open_scans

    if data is None:
        raise UserError(
            f"{folder} tells the age of brains: name scans with --data, a BIDS root, a folder or a NIfTI file"
        )
    model = BrainAgeModel.load(folder, device)
    return Brains(Path(folder).resolve().name, model, open_scans([data]).scans, command=command)
