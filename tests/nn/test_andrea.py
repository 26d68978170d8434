"""The ANDREA family: exact sizes, equality with a plain twin, decoding equal to one pass, and files that are whole or refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from andrea_triton import DTypeError, ShapeError
from andrea_triton.nn import PRESETS, Andrea, AndreaConfig
from andrea_triton.testing import assert_accurate

TINY = AndreaConfig(vocab_size=40, d_model=32, n_head=4, n_layer=2, context=24)
SIZES = {"andrea-12m": 12_780_288, "andrea-120m": 98_698_752, "andrea-480m": 480_513_024}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_preset_has_exactly_its_parameters(name: str, size: int) -> None:
    with torch.device("meta"):
        model = Andrea.preset(name)
    assert sum(p.numel() for p in model.parameters()) == model.config.n_parameters == size
    assert model.config.context == 1024 and model.head.weight is not model.tokens.weight
    assert not any("bias" in n or "norm" in n for n, _ in model.named_parameters())


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        AndreaConfig(vocab_size=7, d_model=24, n_head=6, n_layer=1, context=5, n_kv_head=2, norm="layer", positions="rotary"),
    ],
)
def test_counted_parameters_are_those_it_has(config: AndreaConfig) -> None:
    assert sum(p.numel() for p in Andrea(config).parameters()) == config.n_parameters


class Twin(nn.Module):
    """The model again without anything of this library: PyTorch's own layers, one tensor of weights per name."""

    def __init__(self, model: Andrea) -> None:
        super().__init__()
        self.weights = {name: weight.detach() for name, weight in model.state_dict().items()}
        self.config = model.config

    def forward(self, tokens: Tensor) -> Tensor:
        w, heads, width = self.weights, self.config.n_head, (self.config.d_model,)
        rms_norm, linear = nn.functional.rms_norm, nn.functional.linear
        x = w["tokens.weight"][tokens] + w["positions.weight"][: tokens.shape[1]]
        for i in range(self.config.n_layer):
            h = rms_norm(x, width, eps=1e-6)
            q, k, v = (linear(h, w[f"blocks.{i}.attention.W_{c}.weight"]).unflatten(-1, (heads, -1)) for c in "QKV")
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(y.transpose(1, 2).flatten(2), w[f"blocks.{i}.attention.W_O.weight"])
            h = linear(rms_norm(x, width, eps=1e-6), w[f"blocks.{i}.widen.weight"])
            x = x + linear(nn.functional.gelu(h), w[f"blocks.{i}.narrow.weight"])
        return linear(rms_norm(x, width, eps=1e-6), w["head.weight"])


def accurate(got: Tensor, model: Andrea, tokens: Tensor, name: str) -> None:
    """Judge logits by the model in fp64, with the naive model in fp32 as the yardstick."""
    weights = {n: w.cpu() for n, w in model.state_dict().items()}
    exact, eager = Andrea(model.config, backend="reference").double().eval(), Andrea(model.config, backend="naive").eval()
    exact.load_state_dict(weights)
    eager.load_state_dict(weights)
    with torch.no_grad():
        assert_accurate(got.cpu(), eager(tokens), exact(tokens), torch.float32, name)


@pytest.mark.parametrize("name", ["andrea-12m", None])
def test_forward_equals_plain_twin(name: str | None) -> None:
    model = Andrea(TINY) if name is None else Andrea.preset(name)
    tokens = torch.randint(model.config.vocab_size, (2, 24))
    with torch.no_grad():
        got, eager = model(tokens), Twin(model)(tokens)
        exact = Twin(model.double())(tokens)
    assert_accurate(got, eager, exact, torch.float32, "logits")


def test_fused_and_naive_train_alike() -> None:
    """Three steps from the same seed: losses equal to rounding."""
    losses = {}
    tokens = torch.randint(40, (2, 17))
    for backend in (None, "naive"):
        torch.manual_seed(1)
        model = Andrea(TINY, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[backend] = []
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[backend].append(loss.item())
    assert losses[None] == pytest.approx(losses["naive"], rel=1e-5)


CONFIGS = {
    "plain": TINY,
    "grouped": AndreaConfig(vocab_size=40, d_model=32, n_head=4, n_layer=2, context=24, n_kv_head=2),
    "window": AndreaConfig(vocab_size=40, d_model=32, n_head=4, n_layer=2, context=24, n_kv_head=1, window=5),
    "rotary": AndreaConfig(vocab_size=40, d_model=32, n_head=4, n_layer=2, context=24, positions="rotary", norm="layer"),
}


WAYS = [("torch", name, page_size) for name in CONFIGS for page_size in (None, 4)]
WAYS += [("interpreter", "window", None), ("interpreter", "grouped", 16)]


@pytest.mark.parametrize(("backend", "name", "page_size"), WAYS)
def test_one_pass_equals_prefill_and_decoding(backend: str, name: str, page_size: int | None) -> None:
    """Every position of a ragged batch: prompts of 5 and 3 tokens in one prefill, then token by token."""
    pytest.importorskip("triton") if backend == "interpreter" else None
    model = Andrea(CONFIGS[name], backend=backend).eval()
    T, starts = 7, (5, 3)
    tokens = torch.randint(40, (2, T))
    caches = model.new_caches(2, T, page_size=page_size)
    got: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        accurate(model(tokens), model, tokens, "one pass")
        prompt = torch.zeros(2, 5, dtype=torch.int64)
        for b, n in enumerate(starts):
            prompt[b, 5 - n :] = tokens[b, :n]
        logits = model(prompt, caches=caches, rows=list(starts))
        for b, n in enumerate(starts):
            got[b].append(logits[b, 5 - n :])
        while min(caches[0].counts) < T:
            held = caches[0].counts
            new = torch.stack([tokens[b, min(n, T - 1)] for b, n in enumerate(held)])[:, None]
            rows = [int(n < T) for n in held]
            logits = model(new, caches=caches, rows=rows)
            for b, row in enumerate(rows):
                got[b].append(logits[b, 1 - row :])
    accurate(torch.stack([torch.cat(parts) for parts in got]), model, tokens, "prefill and decoding")


def test_last_gives_the_last_row() -> None:
    model, tokens = Andrea(TINY).eval(), torch.randint(40, (2, 7))
    torch.testing.assert_close(model(tokens, last=True), model(tokens)[:, -1:])


def test_dropout_is_off_in_eval() -> None:
    model, tokens = Andrea(AndreaConfig(40, 32, 4, 2, 24, dropout=0.5)), torch.randint(40, (1, 9))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_file_brings_the_model_back(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    config = AndreaConfig(40, 32, 4, 2, 24, n_kv_head=2, window=(3, 0), softcap=5.0)
    model, tokens = Andrea(config).eval(), torch.randint(40, (1, 9))
    model.save(tmp_path / "deep" / "model.safetensors")
    again = Andrea.load(tmp_path / "deep" / "model.safetensors").eval()
    assert again.config == config and torch.equal(again(tokens), model(tokens))
    assert all(p.requires_grad for p in again.parameters())
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["model.safetensors"]


def test_file_that_is_corrupt_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path, model = tmp_path / "model.safetensors", Andrea(TINY)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is no file"):
        Andrea.load(path)
    model.save(path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\x80\x04garbage"):
        path.write_bytes(damaged)
        with pytest.raises(ShapeError, match="cut off, corrupt or no safetensors file"):
            Andrea.load(path)
    safetensors.save_file(model.state_dict(), path)
    with pytest.raises(ShapeError, match="holds no ANDREA config"):
        Andrea.load(path)
    for config in ({"vocab_size": 40, "unknown": 1}, {"vocab_size": 40, "d_model": 33}, [], {}):
        safetensors.save_file(model.state_dict(), path, {"andrea": json.dumps(config)})
        with pytest.raises(ShapeError, match="holds no ANDREA config"):
            Andrea.load(path)
    wider = {"vocab_size": 41, "d_model": 32, "n_head": 4, "n_layer": 2, "context": 24}
    safetensors.save_file(model.state_dict(), path, {"andrea": json.dumps(wider)})
    with pytest.raises(ShapeError, match=r"2 tensors differ, first head.weight: got \(40, 32\), wanted \(41, 32\)"):
        Andrea.load(path)


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    Andrea(TINY).save(path)
    before = path.read_bytes()

    def half(tensors: dict[str, Tensor], file: Path, notes: dict[str, str]) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors, "save_file", half)
    with pytest.raises(OSError, match="disk full"):
        Andrea(TINY).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_bad_config_fails_when_made() -> None:
    for entries, message in (
        ({"d_model": 30, "n_head": 4}, "d_model is 30, which 4 heads do not divide"),
        ({"vocab_size": 0}, "vocab_size is 0; wanted at least 1"),
        ({"context": -1}, "context is -1"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"n_kv_head": 5}, "n_kv_head is 5"),
        ({"norm": "batch"}, "norm is 'batch'"),
        ({"positions": "none"}, "positions is 'none'"),
        ({"d_model": 12, "n_head": 4, "positions": "rotary"}, "head dim is 3; rotary"),
        ({"window": 0}, "window is 0"),
        ({"dropout": 1.5}, "dropout_p is 1.5"),
    ):
        with pytest.raises(ShapeError, match=message):
            AndreaConfig(**{"vocab_size": 10, **entries})
    with pytest.raises(DTypeError, match="n_layer is a float"):
        AndreaConfig(10, n_layer=2.0)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="wanted one of andrea-12m"):
        Andrea.preset("andrea-1b")
    assert PRESETS["andrea-120m"] == AndreaConfig(8449)


def test_bad_tokens_are_named() -> None:
    model = Andrea(TINY)
    for tokens, error, message in (
        (torch.zeros(1, 25, dtype=torch.int64), ShapeError, "a sequence has 25 tokens; the context is 24"),
        (torch.tensor([[0, 40]]), ShapeError, "tokens go from 0 to 40; wanted 0 to 39"),
        (torch.tensor([[-1, 3]]), ShapeError, "tokens go from -1 to 3"),
        (torch.tensor([1, 2]), ShapeError, r"tokens have shape \(2,\)"),
        (torch.zeros(1, 2), DTypeError, "tokens are torch.float32"),
    ):
        with pytest.raises(error, match=message):
            model(tokens)
    model.requires_grad_(False)
    caches = model.new_caches(1)
    model(torch.zeros(1, 24, dtype=torch.int64), caches=caches)
    with pytest.raises(ShapeError, match="a sequence has 25 tokens; the context is 24"):
        model(torch.zeros(1, 1, dtype=torch.int64), caches=caches)
    with pytest.raises(ShapeError, match="caches do not fit 2 blocks and 2 sequences"):
        model(torch.zeros(2, 1, dtype=torch.int64), caches=caches)
    with pytest.raises(ShapeError, match="the cache holds 4 per sequence"):
        model(torch.zeros(1, 5, dtype=torch.int64), caches=model.new_caches(1, 4))
