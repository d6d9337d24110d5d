"""Layers. A routing is handed to a layer as a class; no layer knows one."""

from torchcaps.layers.backbone import conv_stem, resnet_backbone, simple_backbone
from torchcaps.layers.conv import ConvCaps
from torchcaps.layers.decoder import ConvDecoder, Decoder
from torchcaps.layers.encap import CapConv, CapDeconv, CapFC
from torchcaps.layers.feedback import Feedback, FeedbackUnit
from torchcaps.layers.linear import LinearCaps, SharedCaps
from torchcaps.layers.pooled import FullWindowCaps, PooledConvCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.stack import CapsuleStack, Residual

__all__ = [
    "CapConv",
    "CapDeconv",
    "CapFC",
    "CapsuleStack",
    "ConvCaps",
    "ConvDecoder",
    "Decoder",
    "Feedback",
    "FeedbackUnit",
    "FullWindowCaps",
    "LinearCaps",
    "PooledConvCaps",
    "PrimaryCaps",
    "Residual",
    "SharedCaps",
    "conv_stem",
    "resnet_backbone",
    "simple_backbone",
]
