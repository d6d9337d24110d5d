"""Parts that presets choose by a word, so that a command line or a checkpoint can, or take as they are given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from torchcaps.layers.backbone import PLAIN, BasicBlock, plain_backbone, resnet_backbone
from torchcaps.layers.sizes import feature_shape
from torchcaps.routing import DynamicRouting, EMRouting, SelfAttentionRouting
from torchcaps.types import Image, Routing

ROUTINGS: dict[str, Callable[..., Routing]] = {
    "dynamic": DynamicRouting,
    "em": EMRouting,
    "self_attention": SelfAttentionRouting,
}


def choose(what: str, name: Any, parts: dict[str, Any]) -> Any:
    """The part of that name, or a sentence that lists the names."""
    if name not in parts:
        raise ValueError(f"{what} must be {', '.join(map(repr, parts))} or a part of your own, got {name!r}")
    return parts[name]


def find_routing(routing: str | Callable[..., Routing], **options: Any) -> Callable[..., Routing]:
    """A routing by name, or the class given, with those of the options that were set (are not None).

    An option it does not have is refused; what a partial has set already stays.
    """
    chosen = routing if callable(routing) else choose("routing", routing, ROUTINGS)
    known = inspect.signature(chosen).parameters
    already = chosen.keywords if isinstance(chosen, partial) else {}
    asked = {name: value for name, value in options.items() if value is not None and name not in already}
    for name, value in asked.items():
        if name not in known:
            word = repr(routing) if isinstance(routing, str) else getattr(chosen, "__name__", repr(chosen))
            raise ValueError(f"the routing {word} takes no {name}, got {name}={value!r}")
    return partial(chosen, **asked)


def gives_activations(routing: Callable[..., Routing]) -> bool:
    """Whether a parent's presence is its activation, not the length of its pose."""
    while isinstance(routing, partial):
        routing = routing.func
    return routing is EMRouting


def find_backbone(backbone: str | nn.Module, image: Image, width: int = 128, **more: Callable[[int], nn.Module]) -> Any:
    """A backbone by name, "resnet", one of `PLAIN` or of `more`, or the module given."""
    if isinstance(backbone, nn.Module):
        return backbone
    known = {**more, "resnet": partial(resnet_backbone, width=width)}
    known |= {name: partial(plain_backbone, name=name) for name in PLAIN}
    return choose("backbone", backbone, known)(image[0])


def halved_until(side: int, features: nn.Module, image: Image) -> nn.Module:
    """The features, with residual blocks of stride 2 after them while their map is larger than side x side."""
    channels, height, width = feature_shape(features, image)
    halvings = max(0, math.ceil(math.log2(max(height, width) / side)))
    if not halvings:
        return features
    return nn.Sequential(features, *(BasicBlock(channels, channels, stride=2) for _ in range(halvings)))
