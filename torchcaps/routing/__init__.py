"""Routings: for each a plain function, which is the paper, and a module with what is learnt."""

from torchcaps.routing.attention import AttentionRouting, CapsuleActivation, attention_routing, capsule_activation
from torchcaps.routing.dynamic import DynamicRouting, dynamic_routing
from torchcaps.routing.em import EMRouting, em_routing, hinton_temperature
from torchcaps.routing.inverted_attention import InvertedAttentionRouting, inverted_attention
from torchcaps.routing.master_aide import MasterAide, master_aide
from torchcaps.routing.self_attention import SelfAttentionRouting, self_attention_routing

__all__ = [
    "AttentionRouting",
    "CapsuleActivation",
    "DynamicRouting",
    "EMRouting",
    "InvertedAttentionRouting",
    "MasterAide",
    "SelfAttentionRouting",
    "attention_routing",
    "capsule_activation",
    "dynamic_routing",
    "em_routing",
    "hinton_temperature",
    "inverted_attention",
    "master_aide",
    "self_attention_routing",
]
