"""The nets of torchvision with random weights and small images: every name that its registry has.

Its compiled operators need CUDA's libraries. In their place stand definitions in torch: ``nms`` here, ``roi_align`` of
torchvision's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

MAX_PARAMETERS = 135_000_000  # a larger one does not fit beside its copies, and has a smaller sister
_NMS = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARY: list[torch.library.Library] = []


class Vision(NamedTuple):
    """A net, and what it is asked."""

    name: str
    family: str  # the module that it is of

    def make(self) -> nn.Module:
        """The net in eval mode, with batch norms that have seen data."""
        torch.manual_seed(0)
        made = _build(self.name, self.family)
        for module in made.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.uniform_(-0.1, 0.1)
                module.running_var.uniform_(0.8, 1.2)
        return made.eval()

    def call(self) -> dict[str, Any]:
        """One call."""
        generator = torch.Generator().manual_seed(1)
        area = self.area
        if area == "optical_flow":
            return {"args": tuple(torch.rand(1, 3, 128, 128, generator=generator) for _ in range(2))}
        if area == "video":
            frames = 16 if self.name.startswith(("mvit", "s3d", "swin3d")) else 4
            size = 224 if self.name.startswith(("mvit", "s3d")) else 64
            return {"args": (torch.rand(1, 3, frames, size, size, generator=generator),)}
        if area == "detection":
            return {"args": ([torch.rand(3, 64, 64, generator=generator)],)}
        size = {"inception_v3": 96, "maxvit_t": 224}.get(self.name, 64)
        return {"args": (torch.rand(2, 3, size, size, generator=generator),)}

    def calls(self) -> list[dict[str, Any]]:
        """The call that a net is prepared with, another of its shapes, and the first again."""
        generator = torch.Generator().manual_seed(2)
        first = self.call()
        other = tree_map(lambda tensor: 0.7 * torch.rand(tensor.shape, generator=generator), first)
        return [first, other, first]

    @property
    def area(self) -> str:
        """``"detection"`` and the like; ``""`` for classification."""
        parts = self.family.split(".")
        return parts[2] if len(parts) > 3 else ""


def _build(name: str, family: str) -> nn.Module:
    from torchvision import models

    options: dict[str, Any] = {"weights": None}
    if "detection" in family or "segmentation" in family:
        options |= {"weights_backbone": None, "num_classes": 5}
    elif "optical_flow" not in family:
        options["num_classes"] = 10
    if name.startswith("vit_"):
        options["image_size"] = 64 if not name.endswith("14") else 56
    if name in ("inception_v3", "googlenet"):
        options["init_weights"] = False
    if "detection" in family and not name.startswith("ssd"):
        options |= {"min_size": 64, "max_size": 64}
    made: nn.Module = models.get_model(name, **options)
    return made


def define_operators() -> None:
    """Let torchvision be imported without its compiled operators; call it before."""
    if _LIBRARY:
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define(_NMS)
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", nms, "CPU")
    _LIBRARY.append(library)
    from torchvision.ops import boxes

    boxes._assert_has_ops = lambda: None


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Boxes of the highest scores that do not overlap a better one, as in torchvision's documentation."""
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order]
    low, high = (
        torch.maximum(boxes[:, None, :2], boxes[None, :, :2]),
        torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:]),
    )
    shared = (high - low).clamp(min=0).prod(2)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    overlaps = shared / (area[:, None] + area[None] - shared) > iou_threshold
    kept: list[int] = []
    for place in range(len(boxes)):
        if not kept or not bool(overlaps[place, kept].any()):
            kept.append(place)
    return order[kept]


def nets() -> Iterator[Vision]:
    """Every net of the registry, in its order."""
    from torchvision import models

    for name in models.list_models():
        module = models.get_model_builder(name).__module__
        if "quantization" not in module:
            yield Vision(name, module)


def too_large(net: Vision) -> str | None:
    """Why it is left out, by its published number of parameters; None: it is not."""
    from torchvision import models

    count = next(iter(models.get_model_weights(net.name))).meta["num_params"]
    return f"{count:,} parameters" if count > MAX_PARAMETERS else None
