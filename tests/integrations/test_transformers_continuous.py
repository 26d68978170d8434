"""Continuous batching of transformers by this library: the tokens of its own "sdpa" and "eager", alone and together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton.errors import UnsupportedError
from andrea_triton.integrations.transformers import CONTINUOUS, NAME, attend_continuous, paged, register

transformers = pytest.importorskip("transformers")
configuration = pytest.importorskip("transformers.generation.configuration_utils")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        SIZES | {"sliding_window": 4, "layer_types": LAYERS, "attn_logit_softcapping": None, "query_pre_attn_scalar": 8},
    ),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig",
        SIZES | {"sliding_window": 4, "layer_types": LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}  # fmt: skip
PROMPTS = [[1, 2, 3, 4], [5, 6], list(range(20, 39)), [1, 2, 3, 9, 8]]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()
    register()


def made(name: str) -> Any:
    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    for weight in model.parameters():
        weight.data *= 4.0  # far from uniform, so that rounding does not decide which token is likeliest
    return model


def batched(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Eight tokens for each prompt, at most 12 of all requests in a pass, so that the longest prompt comes in two chunks."""
    settings = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    cache = configuration.ContinuousBatchingConfig(
        num_blocks=32, page_size=8, max_batch_tokens=12, auto_switch_to_flash=False, use_cuda_graph=False
    )
    given = {"generation_config": settings, "continuous_batching_config": cache, "progress_bar": False}
    results = model.generate_batch(inputs=prompts, **given)
    return [results[key].generated_tokens for key in sorted(results, key=lambda key: int(key.split("_")[1]))]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, queries = made(name), []

    def counted(q: Tensor, *rest: Any, **settings: Any) -> Any:
        queries.append(q.shape[0])
        return ours(q, *rest, **settings)

    ours = paged.varlen_attention
    monkeypatch.setattr(paged, "varlen_attention", counted)
    model.set_attn_implementation("eager")
    wanted = batched(model, PROMPTS)
    assert not queries and all(len(tokens) == 8 for tokens in wanted)
    model.set_attn_implementation(CONTINUOUS)
    assert batched(model, PROMPTS) == wanted
    assert len(queries) >= 2 * 8 and max(queries) > 4 > min(queries) > 0, "prompts in chunks, then single tokens"
    assert batched(model, PROMPTS[2:3]) == wanted[2:3]
    assert model.config._attn_implementation == CONTINUOUS


def test_outside_of_it_the_name_is_another_for_the_first() -> None:
    model, ids = made("llama"), torch.randint(3, 64, (2, 9))
    real = torch.ones_like(ids)
    real[0, :3] = 0
    found = {}
    for name in (NAME, CONTINUOUS):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found[name] = model(ids, attention_mask=real).logits
    assert torch.equal(found[NAME], found[CONTINUOUS])


def test_what_is_not_taken_is_named() -> None:
    x, layer = torch.randn(1, 2, 5, 8), torch.nn.Identity()
    for name in ("block_table", "position_bias"):
        with pytest.raises(UnsupportedError, match=name):
            attend_continuous(layer, x, x, x, None, read_index=[], **{name: x})
    with pytest.raises(UnsupportedError, match="whirl"):
        attend_continuous(layer, x, x, x, None, whirl=1)
