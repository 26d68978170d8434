"""Modules over the library's attention, the ANDREA family, and text from it."""

from .andrea import PRESETS, Andrea, AndreaConfig
from .attention import CausalSelfAttention, CrossAttention, SelfAttention
from .generate import Generation, Sampling, Step, generate, stream
from .plot import attention_map

__all__ = [
    "PRESETS",
    "Andrea",
    "AndreaConfig",
    "CausalSelfAttention",
    "CrossAttention",
    "Generation",
    "Sampling",
    "SelfAttention",
    "Step",
    "attention_map",
    "generate",
    "stream",
]
