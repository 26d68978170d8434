"""Training curves: three runs from one seed, told apart only by rounding."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from andrea_triton.nn.data import Corpus
from andrea_triton.train import Options
from bench import curves

SMALL = Options(d_model=16, n_head=2, n_layer=1, context=16, batch=3, steps=4, warmup=2)


@pytest.fixture(scope="module")
def trained() -> curves.Curves:
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0))
    return curves.train(SMALL, Corpus("noise", text[:3000], text[3000:], 1.0, 256))


def test_fused_is_as_far_from_naive_as_naive_is_from_itself(trained: curves.Curves) -> None:
    for dtype, runs in trained.items():
        assert [len(loss) for loss in runs.values()] == [4] * 3
        unit = 1e-5 if dtype == "float32" else 2e-2
        assert max(curves.distance(runs, "fused")) < unit and max(curves.distance(runs, curves.RUNS[2])) < unit
    assert trained["float32"]["naive"] != trained["bfloat16"]["naive"]


def test_another_model_would_be_seen() -> None:
    runs = {"naive": [5.0, 4.0], "fused": [5.0, 4.1], curves.RUNS[2]: [5.0, 4.0]}
    assert curves.distance(runs, "fused") == pytest.approx([0.0, 0.1])
    assert "at most 1.0e-01 apart" in curves.report({"float32": runs})


def test_results_and_plots_are_written(trained: curves.Curves, tmp_path: Path) -> None:
    paths = curves.write(trained, SMALL, tmp_path)
    assert sorted(p.name for p in paths) == sorted(
        ["loss_curves.jsonl", *(f"loss_curves{theme}{kind}" for theme in ("", "-dark") for kind in (".png", ".svg"))]
    )
    lines = [json.loads(line) for line in paths[0].read_text().splitlines()]
    assert len(lines) == 6 and lines[0]["environment"]["versions"]["torch"] and lines[0]["loss"] == trained["float32"]["naive"]
    assert all(path.stat().st_size > 1000 for path in paths[1:])
