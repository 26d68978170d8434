"""Tiny models with random weights, that transformers runs through this library, against its own "eager"."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from andrea_triton.errors import UnsupportedError
from andrea_triton.integrations.transformers import NAME, BandMask, attend, make_mask, register
from andrea_triton.testing import assert_accurate

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")
# torch.compile itself makes an instance of what it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "mistral": ("MistralForCausalLM", "MistralConfig", SIZES | {"sliding_window": 4}),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        SIZES | {"sliding_window": 4, "layer_types": LAYERS, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    ),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig",
        SIZES | {"sliding_window": 4, "layer_types": LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    # Its decoder's layers do not say that they are causal.
    "bigbird_pegasus": (
        "BigBirdPegasusForCausalLM", "BigBirdPegasusConfig",
        {"vocab_size": 64, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
         "max_position_embeddings": 64, "pad_token_id": 0, "scale_embedding": False},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}),
}  # fmt: skip
DECODERS = [name for name in MODELS if name != "bert"]
LENGTH = 11


class Batch(NamedTuple):
    """Six rows of tokens; where padded, row i has i tokens of padding on the left."""

    ids: Tensor
    real: Tensor | None


def batch(padded: bool) -> Batch:
    ids = torch.randint(3, 64, (6, LENGTH))
    real = (torch.arange(LENGTH)[None] >= torch.arange(6)[:, None]).long()
    return Batch(ids.masked_fill(real == 0, 0), real) if padded else Batch(ids, None)


def definition(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What "eager" does, in the dtype of the model all through: the models' own softmax is in fp32 even for fp64."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()
    transformers.AttentionInterface.register("definition", definition)
    transformers.AttentionMaskInterface.register("definition", masking_utils.eager_mask)


def make(name: str) -> Any:
    """The model, with weights large enough that attention is not uniform."""
    model_class, config_class, sizes = MODELS[name]
    config = getattr(transformers, config_class)(**sizes, initializer_range=0.1)
    config.tie_word_embeddings = True
    model = getattr(transformers, model_class)(config).eval()
    for part, weight in model.named_parameters():
        if part.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return model


def as_one(model: Any, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of the model with another attention and dtype."""
    twin = copy.deepcopy(model).to(dtype)
    twin.set_experts_implementation("eager")
    twin.set_attn_implementation(attention)
    return twin


def logits_and_gradients(model: Any, given: Batch) -> tuple[Tensor, Tensor]:
    """The logits of the real tokens, and all gradients of a loss on them as one vector."""
    logits = model(given.ids, attention_mask=given.real).logits
    if given.real is not None:
        logits = logits[given.real.bool()]
    logits.square().mean().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager(name: str, padded: bool) -> None:
    model, given = make(name), batch(padded)
    exact = logits_and_gradients(as_one(model, "definition", torch.float64), given)
    eager = logits_and_gradients(as_one(model, "eager"), given)
    got = logits_and_gradients(as_one(model, NAME), given)
    for what, *tensors in zip(("logits", "gradients"), got, eager, exact, strict=True):
        assert_accurate(*tensors, torch.float32, f"{name} {what}")


def generated(model: Any, given: Batch, cache: str) -> tuple[Tensor, Tensor]:
    """Ten tokens after each row of the batch, and the logits they were taken from."""
    real = torch.ones_like(given.ids) if given.real is None else given.real
    told = model.generate(
        given.ids, attention_mask=real, do_sample=False, max_new_tokens=10, cache_implementation=cache,
        return_dict_in_generate=True, output_logits=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return told.sequences[:, LENGTH:], torch.stack(told.logits)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "C45 left padding"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generates_what_eager_generates(name: str, cache: str, padded: bool) -> None:
    model, given = make(name), batch(padded)
    exact, eager, got = (
        generated(as_one(model, *kind), given, cache) for kind in (("definition", torch.float64), ("eager",), (NAME,))
    )
    assert torch.equal(got[0], exact[0]) and torch.equal(eager[0], exact[0])
    assert_accurate(got[1], eager[1], exact[1], torch.float32, f"{name} logits")


@pytest.mark.parametrize("name", DECODERS)
def test_second_turn_on_a_cache(name: str) -> None:
    model, given = make(name), batch(padded=True)

    def second(twin: Any) -> Tensor:
        cache = transformers.DynamicCache(config=twin.config)
        twin(given.ids[:, :6], attention_mask=given.real[:, :6], cache=cache)
        logits = twin(given.ids[:, 6:], attention_mask=given.real, cache=cache).logits
        assert isinstance(logits, Tensor)
        return logits.detach()

    exact, eager, got = (second(as_one(model, *kind)) for kind in (("definition", torch.float64), ("eager",), (NAME,)))
    assert_accurate(got, eager, exact, torch.float32, f"{name} logits")


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, given = as_one(make("llama"), NAME).train(), batch(padded=True)
    model.config.use_cache = False  # as checkpointing sets it: a cache lays keys out otherwise, and gradients lie as keys do
    wanted = logits_and_gradients(copy.deepcopy(model), given)
    model.activation_checkpointing_enable()
    torch.testing.assert_close(logits_and_gradients(model, given), wanted, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_compiled_model_is_the_eager_one(padded: bool) -> None:
    model, given = as_one(make("mistral"), NAME), batch(padded)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    wanted, got = (run(given.ids, attention_mask=given.real, use_cache=False).logits for run in (model, compiled))
    torch.testing.assert_close(got, wanted)  # not to the bit: PyTorch's CPU kernels round by where tensors lie


@pytest.mark.slow
def test_compiled_decoder_whose_layers_do_not_say_that_they_are_causal() -> None:
    model, given = make("bigbird_pegasus"), batch(padded=False)
    exact, eager, got = (as_one(model, *kind) for kind in (("definition", torch.float64), ("eager",), (NAME,)))
    torch._dynamo.reset()
    compiled = torch.compile(got, fullgraph=True, backend="aot_eager")
    logits = [run(given.ids, use_cache=False).logits.detach() for run in (compiled, eager, exact)]
    assert_accurate(*logits, torch.float32, "logits")


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_rows_by_position_ids(name: str) -> None:
    model, ids = make(name), torch.randint(3, 64, (2, LENGTH))
    positions = torch.tensor([[*range(4), *range(LENGTH - 4)], [*range(LENGTH - 1), 0]])
    exact, eager, got = (
        as_one(model, *kind)(ids, position_ids=positions, use_cache=False).logits.detach()
        for kind in (("definition", torch.float64), ("eager",), (NAME,))
    )
    assert_accurate(got, eager, exact, torch.float32, "logits")


def packed(*lengths: int) -> dict[str, Any]:
    """The keywords that say where the sequences of a pack start."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": max(lengths), "max_length_k": max(lengths)}


@pytest.mark.parametrize("told", ["starts", "starts and positions"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packed_rows_by_cu_seq_lens(name: str, told: str) -> None:
    model, ids = make(name), torch.randint(3, 64, (1, LENGTH))
    positions = torch.tensor([[*range(5), *range(LENGTH - 5)]]) if "positions" in told else None
    got = as_one(model, NAME)(ids, position_ids=positions, use_cache=False, **packed(5, LENGTH - 5)).logits.detach()
    alone = (slice(0, 5), slice(5, LENGTH))
    exact, eager = (
        torch.cat([twin(ids[:, rows], use_cache=False).logits.detach() for rows in alone], 1)
        for twin in (as_one(model, "definition", torch.float64), as_one(model, "eager"))
    )
    assert_accurate(got, eager, exact, torch.float32, f"{name} logits")


def test_packed_rows_under_a_written_out_mask_and_a_bias() -> None:
    q, k, v = (torch.randn(1, heads, LENGTH, 8) for heads in (4, 2, 2))
    seen, bias = torch.rand(1, 1, LENGTH, LENGTH) < 0.7, torch.randn(1, 4, LENGTH, LENGTH)
    for mask, told in ((seen, {}), (None, {"position_bias": bias}), (bias, {}), (seen, {"position_bias": bias})):
        out, _ = attend(torch.nn.Identity(), q, k, v, mask, **told, **packed(4, LENGTH - 4))
        for rows in (slice(0, 4), slice(4, LENGTH)):
            cut = None if mask is None else mask[:, :, rows, rows]
            biases = {name: x[:, :, rows, rows] for name, x in told.items()}
            alone, _ = attend(torch.nn.Identity(), q[:, :, rows], k[:, :, rows], v[:, :, rows], cut, **biases)
            torch.testing.assert_close(out[:, rows], alone)


def test_packed_rows_that_cannot_be_told_apart_are_refused() -> None:
    x, chunked = torch.randn(1, 2, 8, 8), torch.nn.Identity()
    with pytest.raises(UnsupportedError, match="batch of one"):
        attend(chunked, *[x.expand(2, -1, -1, -1)] * 3, None, **packed(3, 5))
    chunked.config = transformers.PreTrainedConfig(attention_chunk_size=4)
    place = torch.arange(8)
    chunks = (place[:, None] // 4 == place // 4)[None, None].tril()
    with pytest.raises(UnsupportedError, match="position_ids"):
        attend(chunked, x, x, x, chunks, **packed(3, 5))
    attend(chunked, x, x, x, chunks, **packed(4, 4))


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # the second does not hand the request down to its layers
def test_request_for_the_weights_is_refused(name: str) -> None:
    model = as_one(make(name), NAME)
    with pytest.raises(UnsupportedError, match=r"output_attentions.*'eager'"):
        model(torch.randint(3, 64, (1, 4)), output_attentions=True)
    model(torch.randint(3, 64, (1, 4)), output_hidden_states=True)


def test_prefix_model_without_token_types_is_what_eager_is() -> None:
    text = SIZES | {"model_type": "gemma", "initializer_range": 0.1}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
              "patch_size": 8}  # fmt: skip
    told: dict[str, Any] = {"projection_dim": 32, "image_token_index": 63}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision | {"model_type": "siglip_vision_model"}, **told)
    model, ids = transformers.PaliGemmaForConditionalGeneration(config).eval(), torch.randint(3, 63, (2, LENGTH))
    types = (torch.arange(LENGTH) >= 6).long().expand(2, -1)
    for given in ({}, {"token_type_ids": types}, {"attention_mask": torch.ones_like(ids)}):
        exact, eager, got = (
            as_one(model, *kind)(ids, **given).logits.detach() for kind in (("definition", torch.float64), ("eager",), (NAME,))
        )
        assert_accurate(got, eager, exact, torch.float32, f"logits with {', '.join(given) or 'nothing'}")


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_model_in_bf16(name: str) -> None:
    model, given = make(name).to(torch.bfloat16), batch(padded=True)
    exact, eager, got = (
        logits_and_gradients(as_one(model, kind, dtype), given)[0]
        for kind, dtype in (("definition", torch.float64), ("eager", torch.bfloat16), (NAME, torch.bfloat16))
    )
    assert_accurate(got, eager, exact, torch.bfloat16, f"{name} logits")


def test_masks_and_biases_say_the_same() -> None:
    layer, x, bias = torch.nn.Identity(), torch.randn(2, 4, 5, 8), torch.randn(1, 4, 5, 5)
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    additive = torch.zeros(2, 1, 5, 5).masked_fill(~seen, torch.finfo(torch.float32).min)
    wanted, _ = attend(layer, x, x, x, None, is_causal=True, position_bias=bias)
    for mask in (seen, additive, BandMask((2, 1, 5, 5), x.device, 0, None, 0, None)):
        torch.testing.assert_close(attend(layer, x, x, x, mask, position_bias=bias)[0], wanted)


@pytest.mark.parametrize("keyword", ["output_attentions", "block_table", "indices"])
def test_unknown_keyword_is_named(keyword: str) -> None:
    x = torch.randn(1, 2, 3, 8)
    attend(torch.nn.Identity(), x, x, x, None, **{keyword: None})
    with pytest.raises(UnsupportedError, match=keyword):
        attend(torch.nn.Identity(), x, x, x, None, **{keyword: True})


@pytest.mark.parametrize("mask", [torch.ones(1, 3), torch.ones(1, 1, 3, 3, dtype=torch.int64), "causal"], ids=str)
def test_unknown_mask_is_named(mask: Any) -> None:
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(UnsupportedError, match="attention_mask"):
        attend(torch.nn.Identity(), x, x, x, mask)


PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "window to both sides": masking_utils.sliding_window_bidirectional_mask_function(4),
}


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_band_is_the_mask_of_sdpa(pattern: str, before: int) -> None:
    padding = torch.ones(2, before + 7, dtype=torch.bool)
    padding[0, :2] = False
    told: dict[str, Any] = {
        "batch_size": 2, "q_length": 7, "kv_length": before + 7, "q_offset": before, "mask_function": PATTERNS[pattern],
        "attention_mask": padding, "local_size": 4 if "window" in pattern else None,
    }  # fmt: skip
    mask = make_mask(**told)
    assert isinstance(mask, BandMask)
    wanted = masking_utils.sdpa_mask(**told)
    other = torch.rand(2, 1, 7, before + 7) < 0.5
    for got, want in ((mask.dense(), wanted), (mask & other, wanted & other), (mask[:, 0], wanted[:, 0]), (~mask, ~wanted)):
        assert type(got) is Tensor and torch.equal(got, want)


def packing(positions: Tensor, pattern: str) -> dict[str, Any]:
    """What transformers tells of rows packed by their positions (B, N)."""
    sequences = masking_utils.find_packed_sequence_indices(positions)
    inside = masking_utils.remap_positions_for_packed_sequence(PATTERNS[pattern], positions)
    return {
        "batch_size": positions.shape[0], "q_length": positions.shape[1], "kv_length": positions.shape[1],
        "mask_function": masking_utils.and_masks(inside, masking_utils.packed_sequence_mask_function(sequences)),
        "local_size": 4 if "window" in pattern else None, "allow_is_causal_skip": False,
    }  # fmt: skip


@pytest.mark.parametrize("pattern", ["causal", "window"])
def test_packed_rows_are_the_mask_of_sdpa(pattern: str) -> None:
    told = packing(torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]]), pattern)
    mask = make_mask(**told)
    assert isinstance(mask, BandMask) and mask.longest == 9 and mask.starts is not None
    assert mask.starts.tolist() == [0, 5, 7, 9, 18]
    assert torch.equal(mask.dense(), masking_utils.sdpa_mask(**told))
    q, k, v = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    bias = torch.randn(1, 4, 9, 9)
    for given in ({}, {"position_bias": bias}):
        wanted, _ = attend(torch.nn.Identity(), q, k, v, mask.dense(), **given)
        torch.testing.assert_close(attend(torch.nn.Identity(), q, k, v, mask, **given)[0], wanted)


def test_band_takes_no_memory_of_the_matrix() -> None:
    length = 2**16  # written out, the mask would take 4 GiB
    told: dict[str, Any] = {"batch_size": 1, "q_length": length, "kv_length": length}
    assert make_mask(**told) is None
    mask = make_mask(**told, mask_function=PATTERNS["window"], local_size=4, attention_mask=torch.arange(length)[None] > 0)
    assert isinstance(mask, BandMask) and mask.shape == (1, 1, length, length)
    assert mask.keys is not None and mask.keys.shape == (1, length)
    mask = make_mask(**packing(torch.arange(length)[None] % (length // 4), "window"))
    assert isinstance(mask, BandMask) and mask.starts is not None and mask.starts.shape == (5,)


def test_pattern_that_is_no_band_is_written_out() -> None:
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    told: dict[str, Any] = {"batch_size": 1, "q_length": 9, "kv_length": 9, "mask_function": chunks, "local_size": 4}
    mask = make_mask(**told)
    assert mask is not None and torch.equal(mask, masking_utils.sdpa_mask(**told))
