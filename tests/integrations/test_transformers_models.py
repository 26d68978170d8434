"""Which models of transformers can have this attention: the refused ones by name, and all the others against "eager"."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton.errors import UnsupportedError
from andrea_triton.integrations.transformers import NAME, register
from andrea_triton.integrations.transformers.models import require_fit, takes_bool_masks
from andrea_triton.testing import assert_accurate

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


# Their base model refuses before a layer is made, so the sizes are the default ones.
REFUSED = {
    "Bloom": "eager", "Mpt": "eager", "XGLM": "eager", "LED": "eager", "MPNet": "eager", "RoFormer": "eager",
    "RemBert": "eager", "MegatronBert": "eager", "WavLM": "eager", "Falcon": "sdpa", "GPTNeo": "eager", "Git": "eager",
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_model_with_an_attention_of_its_own_is_refused(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(attn_implementation=NAME, vocab_size=8)
    with pytest.raises(UnsupportedError, match=rf"(?s){family}.*use attn_implementation='{REFUSED[family]}'"):
        getattr(transformers, f"{family}Model")(config)


def sam() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "mlp_dim": 16}
    vision = sizes | {"image_size": 32, "patch_size": 16, "output_channels": 16, "global_attn_indexes": [0]}
    prompts = {"hidden_size": 16, "image_size": 32, "patch_size": 16, "mask_input_channels": 4}
    return transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=sizes)


def test_the_way_out_of_a_refusal_works() -> None:
    with pytest.raises(UnsupportedError, match="<sub-config>"):
        transformers.SamModel._from_config(sam(), attn_implementation=NAME)
    with pytest.raises(UnsupportedError, match="<sub-config>"):
        transformers.SamModel(sam()).set_attn_implementation(NAME)
    model = transformers.SamModel._from_config(sam(), attn_implementation={"": NAME, "vision_config": "sdpa"})
    assert model.config._attn_implementation == NAME and model.config.vision_config._attn_implementation == "sdpa"


def test_a_config_that_asks_for_the_weights_is_refused() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8
    )
    config.output_attentions = True
    model = transformers.LlamaModel(config)
    with pytest.raises(UnsupportedError, match="output_attentions"):
        model.set_attn_implementation(NAME)


def test_another_name_is_not_checked() -> None:
    sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8}
    assert transformers.BloomModel(transformers.BloomConfig(**sizes)).config._attn_implementation == "eager"


class Unknown(transformers.PreTrainedConfig):  # type: ignore[misc,name-defined]
    """A config that no model is known for."""


@pytest.mark.parametrize(
    ("config", "wanted"),
    [("LlamaConfig", True), ("Gemma2Config", True), ("BigBirdPegasusConfig", False), ("PegasusXConfig", False), ("", False)],
)
def test_models_that_only_eager_runs_get_the_masks_of_eager(config: str, wanted: bool) -> None:
    assert takes_bool_masks(getattr(transformers, config) if config else Unknown) is wanted


@pytest.mark.parametrize("family", ["Splinter", "PegasusX"])
def test_layers_that_do_not_know_whether_they_are_causal(family: str) -> None:
    """Neither is told by is_causal: an encoder without the attribute, and a decoder where it is False."""
    config = tiny(getattr(transformers, f"{family}Config"))
    model, ids = getattr(transformers, f"{family}Model")(config).eval(), torch.randint(3, 60, (2, 9))
    told = {"decoder_input_ids": ids} if family == "PegasusX" else {}
    got, eager, exact = (
        twin(ids, use_cache=False, **told).last_hidden_state.detach()
        for twin in (switched(model, NAME), switched(model, "eager"), switched(model.double(), "eager"))
    )
    assert_accurate(got, eager, exact, torch.float32, family)


def switched(model: Any, attention: str) -> Any:
    """A copy of the model with another attention."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(attention)
    return twin


def modeling_modules() -> Iterator[Any]:
    """The files of transformers that hold models."""
    for _, name, _ in pkgutil.walk_packages(transformers.models.__path__, "transformers.models."):
        if name.rsplit(".", 1)[1].startswith("modeling_") and "higgs_audio_v2_tokenizer" not in name:  # wants torchaudio
            yield importlib.import_module(name)


def is_refused(model: type) -> bool:
    try:
        require_fit(model, None)
    except UnsupportedError:
        return True
    return False


@pytest.mark.slow
def test_every_file_that_transformers_calls_unfit_has_a_refused_model() -> None:
    """A look into the source as its own is, together with the flags, against ours into the code of the classes."""
    for module in modeling_modules():
        models = [m for m in vars(module).values() if isinstance(m, type) and issubclass(m, transformers.PreTrainedModel)]
        models = [m for m in models if m.__module__ == module.__name__]
        flags = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
        vouched = any(getattr(m, flag) for m in models for flag in flags)
        refused = [m for m in models if is_refused(m)]
        source = inspect.getsource(module)
        own = not vouched and "ALL_ATTENTION_FUNCTIONS" not in source and re.search(r"def forward\([^)]*attention_mask", source)
        attention = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
        table = re.search(r"_CLASSES\[\S*attn_implementation\]", source)
        assert refused or not (table or (own and attention)), module.__name__


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "n_layer": 2,
    "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "n_positions": 64, "num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "rotary_dim": 4, "sliding_window": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_chunk_size": 4, "is_decoder": True,
}  # fmt: skip


def tiny(config_class: Any) -> Any:
    """A config of the family, as small as its own names for sizes allow."""
    usual = config_class()
    renamed = getattr(usual, "attribute_map", {})
    sizes = {k: v for k, v in SIZES.items() if k not in renamed and getattr(usual, k, None) is not None}
    if getattr(usual, "layer_types", None) is not None:
        kinds = list(dict.fromkeys(usual.layer_types))
        sizes["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    return config_class(**sizes)


def families() -> dict[str, tuple[Any, Any]]:
    """The model and the config class of every decoder."""
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = {kind: model if isinstance(model, str) else model[0] for kind, model in mapping.items()}
    return {kind: (name, transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES[kind]) for kind, name in names.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_decoder_gives_the_logits_of_eager(family: str) -> None:
    model_name, config_name = families()[family]
    ids = torch.randint(3, 60, (3, 11))
    real = (torch.arange(11)[None] >= torch.arange(3)[:, None]).long()
    try:
        config = tiny(getattr(transformers, config_name))
        with torch.device("meta"):
            size = sum(p.numel() for p in getattr(transformers, model_name)(copy.deepcopy(config)).parameters())
        assert size < 3e6
        model = getattr(transformers, model_name)(config).eval()
        model.set_attn_implementation("eager")
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.15)
        wanted = logits(model, ids, None), logits(model, ids, real)
    except Exception as error:
        pytest.skip(f"no tiny model: {error}")
    config = copy.deepcopy(model.config)
    config._attn_implementation = NAME
    try:
        type(model)(config)
        twin = copy.deepcopy(model)
        twin.set_attn_implementation(NAME)
        got = logits(twin, ids, None), logits(twin, ids, real)
    except UnsupportedError:
        return
    scale = wanted[0].abs().max()
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-4 * scale


def logits(model: Any, ids: Tensor, real: Tensor | None) -> Tensor:
    """Those of the real tokens."""
    with torch.no_grad():
        out = model(ids, attention_mask=real, use_cache=False).logits
    assert isinstance(out, Tensor)
    return out if real is None else out[real.bool()]
