"""Modules over the library's attention, the ANDREA family, and text from it."""

from .andrea import PRESETS, Andrea, AndreaConfig
from .attention import CausalSelfAttention, CrossAttention, SelfAttention
from .beams import Beam, beam_search
from .generate import Generation, Sampling, generate, stream
from .plot import attention_map
from .readers import Step
from .speculate import Speculation, speculate

__all__ = [
    "PRESETS",
    "Andrea",
    "AndreaConfig",
    "Beam",
    "CausalSelfAttention",
    "CrossAttention",
    "Generation",
    "Sampling",
    "SelfAttention",
    "Speculation",
    "Step",
    "attention_map",
    "beam_search",
    "generate",
    "speculate",
    "stream",
]
