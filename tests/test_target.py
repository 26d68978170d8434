"""The machine is chosen by the tensor's device; fakes stand in for the machines that are not here."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from andrea_triton import UnsupportedError, attention, explain, ops, target
from andrea_triton.problem import make_problem
from andrea_triton.spec import make_spec

CAPABILITIES = [(8, 0), (9, 0)]
DEVICES = ["cuda:0", "cuda:1", "xpu:1"]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What one fake machine answered is not kept for the next."""
    target._device_target.cache_clear()
    yield
    target._device_target.cache_clear()


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sm_80 card, which is the current one, and an sm_90 card."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: CAPABILITIES[index])


@pytest.mark.parametrize(
    ("device", "chosen"),
    [("cpu", "torch"), ("cuda:0", "triton"), ("cuda:1", "triton"), ("xpu:0", "triton"), ("mps", "torch"), ("meta", "torch")],
)
def test_backend_of_a_device(monkeypatch: pytest.MonkeyPatch, device: str, chosen: str) -> None:
    monkeypatch.setattr(target, "has_triton", lambda: True)
    assert target.default_backend(torch.device(device)) == chosen
    assert torch.device(device).type in target.reason(torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
def test_without_triton_a_gpu_gets_torch(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(target, "has_triton", lambda: False)
    assert target.default_backend(torch.device(device)) == "torch"
    assert "pip install triton" in target.reason(torch.device(device))
    with pytest.raises(UnsupportedError, match="Triton is missing"):
        target.check_backend("triton", torch.device(device))


@pytest.mark.parametrize(
    ("name", "device"), [("triton", "cpu"), ("triton", "mps"), ("interpreter", "cuda:1"), ("interpreter", "xpu:0")]
)
def test_a_backend_on_the_wrong_device(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    monkeypatch.setattr(target, "has_triton", lambda: True)
    with pytest.raises(UnsupportedError, match="backend="):
        target.check_backend(name, torch.device(device))


def test_the_card_of_the_tensor_not_the_current_one(two_cards: None) -> None:
    assert target.target_of(torch.device("cuda:1")) == "sm_90"
    assert target.target_of(torch.device("cuda:0")) == "sm_80"
    assert target.target_of(torch.device("cuda")) == "sm_80"
    assert target.target_of(torch.device("cpu")) == "interpreter"
    assert target.target_of(torch.device("xpu:1")) == "xpu"


def test_hip(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["gfx90a:sramecc+:xnack-", "gfx942:sramecc+:xnack-"]
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=names[index]))
    assert target.target_of(torch.device("cuda:1")) == "gfx942"
    assert target.target_of(torch.device("cuda:0")) == "gfx90a"


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_start_under_the_tensors_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Each library's own context manager is asked, with the tensor's device."""
    run = pytest.importorskip("andrea_triton.launch.run", exc_type=ModuleNotFoundError)
    current: list[Any] = [torch.device("cuda:0")]
    started: list[Any] = []
    streams: list[Any] = []

    @contextmanager
    def entered(there: torch.device) -> Iterator[None]:
        current.append(there)
        yield
        current.pop()

    other = "xpu" if device.startswith("cuda") else "cuda"
    monkeypatch.setattr(getattr(torch, torch.device(device).type), "device", entered)
    monkeypatch.setattr(getattr(torch, other), "device", lambda there: pytest.fail(f"{other} was asked for {there}"))
    monkeypatch.setattr(target, "stream", lambda there: streams.append(there))
    kernel = SimpleNamespace(run=lambda *_: started.append(current[-1]), function=0, packed_metadata=0)
    start = (kernel, None, (1, 1, 1), tuple, (), True, ())
    monkeypatch.setattr(run, "ready", lambda *_: started.append(current[-1]) or start)
    monkeypatch.setattr(target, "target_of", lambda there: "sm_80")
    x = torch.zeros(1, 1, 1, 1)
    problem = replace(make_problem(x, x, x, make_spec()), device=torch.device(device))
    work = run.Work(lambda *_: [], lambda *_: [SimpleNamespace(grid=(1, 1))], strided=1)
    run.go(run._learned(work, [], (x,), [], problem, (), "ieee").starts, (), problem)
    assert started == [torch.device(device)] * 2 and streams == [torch.device(device)]
    assert current == [torch.device("cuda:0")]


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_takes_the_backend_of_its_tensors(monkeypatch: pytest.MonkeyPatch, two_cards: None, device: str) -> None:
    """Fake tensors have a device and no memory; what the public function hands on is what counts."""
    taken = []

    def attend(problem: Any, q: torch.Tensor, k: Any, v: Any, bias: Any, sinks: Any, backend: str, **how: Any) -> Any:
        taken.append((backend, problem.device))
        return torch.empty_like(q), q.new_empty(q.shape[:3])

    monkeypatch.setattr(target, "has_triton", lambda: True)
    monkeypatch.setattr(ops, "attend", attend)
    with FakeTensorMode():
        q = torch.empty(1, 2, 16, 8, device=device)
        assert attention(q, q, q, causal=True).device == torch.device(device)
        assert explain(q, q, q).backend == "triton"
    assert taken == [("triton", torch.device(device))]


@pytest.mark.parametrize("device", DEVICES)
def test_results_lie_on_the_device_of_the_inputs(device: str) -> None:
    """Through the operators, whose fakes say where every result is."""
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(1, 2, 16, 8, device=device)
        results = attention(q, q, q, causal=True, return_lse=True, backend="torch")
    assert {t.device for t in results} == {torch.device(device)}


class Settings:
    """torch's precision settings, put back at the end."""

    def __init__(self) -> None:
        self.places: list[Any] = [torch.backends, torch.backends.cuda.matmul]
        self.newer = hasattr(torch.backends, "fp32_precision")
        self.before = [place.fp32_precision for place in self.places] if self.newer else [torch.get_float32_matmul_precision()]

    def restore(self) -> None:
        if not self.newer:
            torch.set_float32_matmul_precision(self.before[0])
        for place, value in zip(self.places, self.before, strict=False) if self.newer else ():
            place.fp32_precision = value


@pytest.fixture
def torch_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    monkeypatch.delenv("ANDREA_TRITON_FLOAT32", raising=False)
    settings = Settings()
    yield settings
    settings.restore()


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ((), "fastest"),
        (("set high",), "tf32"),
        (("set medium",), "tf32"),
        (("allow True",), "tf32"),
        (("all tf32",), "tf32"),
        (("matmul tf32",), "tf32"),
        (("all ieee",), "ieee"),
        (("matmul ieee",), "ieee"),
        (("all tf32", "matmul ieee"), "ieee"),
        (("all ieee", "matmul tf32"), "tf32"),
        (("set high", "matmul ieee"), "ieee"),
        (("matmul tf32", "set highest"), "ieee"),
        (("all tf32", "allow False"), "ieee"),
        (("matmul ieee", "set high"), "tf32"),
    ],
)
def test_precision_by_either_of_torchs_settings(steps: tuple[str, ...], found: str, torch_settings: Settings) -> None:
    """The last word counts, whichever way it was said; where torch has but the older way, its default says nothing."""
    for step in steps:
        place, value = step.split()
        if place == "set":
            torch.set_float32_matmul_precision(value)
        elif place == "allow":
            torch.backends.cuda.matmul.allow_tf32 = value == "True"
        elif not torch_settings.newer:
            pytest.skip("this torch has the older setting alone")
        else:
            torch_settings.places[place == "matmul"].fp32_precision = value
    assert target.float32_precision() == found


@pytest.mark.parametrize(("asked", "found"), [("highest", "fastest"), ("high", "tf32"), ("medium", "tf32")])
def test_precision_by_the_older_setting_alone(monkeypatch: pytest.MonkeyPatch, asked: str, found: str) -> None:
    """As before torch 2.9."""
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace())
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: asked)
    assert target.float32_precision() == found


def test_precision_by_the_environment(monkeypatch: pytest.MonkeyPatch, torch_settings: Settings) -> None:
    torch.set_float32_matmul_precision("high")
    for own, found in (("ieee", "ieee"), ("tf32x3", "tf32x3"), ("", "tf32")):
        monkeypatch.setenv("ANDREA_TRITON_FLOAT32", own)
        assert target.float32_precision() == found
    monkeypatch.setenv("ANDREA_TRITON_FLOAT32", "tf32")
    with pytest.raises(UnsupportedError, match="wanted ieee or tf32x3"):
        target.float32_precision()


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["filelock", 'triton==3.7.1; platform_system == "Linux"'], "triton==3.7.1"),
        (['triton~=3.8.0; platform_system == "Linux" and python_version < "3.15"'], "triton~=3.8.0"),
        (["triton (==3.6.0)"], None),
        (["pytorch-triton-rocm==3.2.0"], "pytorch-triton-rocm==3.2.0"),
        (["sympy>=1.13.3"], None),
        (None, None),
    ],
)
def test_what_torch_requires_of_triton(monkeypatch: pytest.MonkeyPatch, lines: list[str] | None, found: str | None) -> None:
    monkeypatch.setattr(target.importlib.metadata, "requires", lambda name: lines)
    assert target.required_triton() == found


@pytest.mark.parametrize(
    ("installed", "required", "way_out"),
    [
        ("3.5.1", "triton==3.5.1", "pip install 'torch>=2.10'"),
        ("3.5.1", None, "pip install 'triton>=3.6,<3.10'"),
        ("3.10.0", "triton==3.10.0", "pip install 'triton>=3.6,<3.10'"),
    ],
)
def test_the_error_of_a_triton_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, installed: str, required: str | None, way_out: str
) -> None:
    monkeypatch.setattr(target, "triton_version", lambda: installed)
    monkeypatch.setattr(target, "required_triton", lambda: required)
    with pytest.raises(UnsupportedError) as raised:
        target.blame_triton(AttributeError("no such name"))
    assert way_out in str(raised.value) and f"Triton {installed}" in str(raised.value) and "backend='torch'" in str(raised.value)


def test_the_pairs_of_torch_and_triton_are_the_same_everywhere() -> None:
    """What code, package and README say of the oldest that work."""
    root = Path(__file__).parents[1]
    first, oldest = target.TORCH_PAIRS[0]
    package, readme = (" ".join((root / name).read_text().split()) for name in ("pyproject.toml", "README.md"))
    assert f"\"torch>={first}; platform_system == 'Linux'\"" in package
    assert (
        f"\"triton>={oldest}; platform_system == 'Linux'\"" in package
        and target.version_numbers(oldest) == target.TESTED_TRITON[0]
    )
    assert f"torch must be {first} or newer" in readme and f"Triton {target.tested_triton()} are tested" in readme
    for torch_version, triton in target.TORCH_PAIRS:
        assert re.search(rf"{re.escape(torch_version)}( and [\d.]+)?( come)? with (Triton )?{re.escape(triton)}\b", readme), (
            torch_version
        )
        assert re.search(rf"{re.escape(torch_version)}( and [\d.]+)? triton {re.escape(triton)}\b", package), torch_version
