"""The nets of torchvision with random weights and small images: every name that its registry has.

Where its compiled operators do not load, since they are made for another torch, definitions in torch stand in their
place: ``nms`` here, ``roi_align`` of torchvision's own.
"""

from __future__ import annotations

import importlib
import re
import sys
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
        made = _build(self)
        for module in made.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.uniform_(-0.1, 0.1)
                module.running_var.uniform_(0.8, 1.2)
        if self.area == "detection":
            settle(made.eval(), self.call())
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
            return {"args": ([torch.rand(3, self.image_size, self.image_size, generator=generator)],)}
        return {"args": (torch.rand(2, 3, self.image_size, self.image_size, generator=generator),)}

    def calls(self) -> list[dict[str, Any]]:
        """The call that a net is prepared with, another of its shapes, and the first again."""
        generator = torch.Generator().manual_seed(2)
        first = self.call()
        other = tree_map(lambda tensor: torch.rand(tensor.shape, generator=generator), first)
        return [first, other, first]

    @property
    def image_size(self) -> int:
        """Pixels of a side; the smallest that leave a few positions at the end of the net."""
        if self.area == "detection" and "mobilenet" in self.name:
            return 128
        return {"inception_v3": 96, "maxvit_t": 224}.get(self.name, 64)

    @property
    def area(self) -> str:
        """``"detection"`` and the like; ``""`` for classification."""
        parts = self.family.split(".")
        return parts[2] if len(parts) > 3 else ""


def _build(net: Vision) -> nn.Module:
    from torchvision import models

    name, family = net.name, net.family
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
        options |= {"min_size": net.image_size, "max_size": net.image_size}
    if "rcnn_" in name:  # few, so that rounding exchanges no two of them; and each is aligned in Python here
        options |= {"rpn_post_nms_top_n_test": 30, "box_detections_per_img": 20}
    elif "detection" in family:
        options |= {"topk_candidates": 20, "detections_per_img": 20}
    made: nn.Module = models.get_model(name, **options)
    return made


_SCORES = re.compile(r".*(cls_logits|cls_score|bbox_ctrness|classification_head\.module_list\.\d+(\.1)?)")


def settle(net: nn.Module, call: dict[str, Any]) -> None:
    """Scale a net with random weights by the call that flows through it, so that its results depend on its input.

    Otherwise signals fade from layer to layer: the scores of a detection net are then equal but for rounding, which
    decides what it finds, or all lie below its threshold.
    """
    hooks = []
    for name, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            hooks.append(module.register_forward_pre_hook(_normalise))
        elif isinstance(module, nn.Conv2d | nn.Linear) and _SCORES.fullmatch(name):
            hooks.append(module.register_forward_hook(_spread))
    if hooks:
        with torch.no_grad():
            net(*call["args"])
    for hook in hooks:
        hook.remove()


def _normalise(norm: Any, args: tuple[Tensor]) -> None:
    x = args[0]
    dims = [0, *range(2, x.dim())]
    if x[:, 0].numel() < 16:  # what a channel holds at few positions says little of another image
        norm.running_mean.fill_(x.mean())
        norm.running_var.fill_(x.var())
    else:
        variance = x.var(dims)
        norm.running_mean.copy_(x.mean(dims))
        norm.running_var.copy_(torch.maximum(variance, variance.mean()))


def _spread(layer: Any, args: tuple[Tensor], scores: Tensor) -> None:
    """Let scores have a deviation of one; only by the first of several images or levels."""
    if not hasattr(layer, "is_spread"):
        layer.weight.div_(scores.std().clamp(min=0.01))
        layer.bias.zero_()
        layer.is_spread = True


def define_operators() -> None:
    """Let torchvision be imported where its compiled operators do not load; call it before."""
    if _LIBRARY or _loads():
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define(_NMS)
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", nms, "CPU")
    _LIBRARY.append(library)
    from torchvision.ops import boxes

    boxes._assert_has_ops = lambda: None


def _loads() -> bool:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return False
    return True


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
