"""Names for parts that presets choose by a word, so that a command line or a checkpoint can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torchcaps.layers.backbone import resnet_backbone, simple_backbone
from torchcaps.routing import DynamicRouting, EMRouting, InvertedAttentionRouting, SelfAttentionRouting
from torchcaps.types import Routing

ROUTINGS: dict[str, Callable[..., Routing]] = {
    "dynamic": DynamicRouting,
    "em": EMRouting,
    "inverted_attention": InvertedAttentionRouting,
    "self_attention": SelfAttentionRouting,
}


def choose(what: str, name: Any, parts: dict[str, Any]) -> Any:
    """The part of that name, or a sentence that lists the names."""
    if name not in parts:
        raise ValueError(f"{what} must be {', '.join(map(repr, parts))} or a module of your own, got {name!r}")
    return parts[name]


def find_routing(routing: str | Callable[..., Routing]) -> Callable[..., Routing]:
    return choose("routing", routing, ROUTINGS) if isinstance(routing, str) else routing


def find_backbone(
    backbone: str | nn.Module, channels: int, simple: Callable[[int], nn.Module] = simple_backbone, width: int = 128
) -> nn.Module:
    """A backbone by name, "simple" or "resnet", or the module given."""
    if isinstance(backbone, nn.Module):
        return backbone
    return choose("backbone", backbone, {"simple": simple, "resnet": lambda c: resnet_backbone(c, width)})(channels)
