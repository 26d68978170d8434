"""Faults at run time: each is one error that names the way out, or none at all. Where a driver is needed, a child process has the
stub's."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from andrea_triton import attention, backends, target
from andrea_triton.errors import CompileError, ShapeError, UnsupportedError
from andrea_triton.launch import compile as compiler
from andrea_triton.launch import interpreter, start
from andrea_triton.launch.faults import explained, way_out
from andrea_triton.launch.plan import Launch, Saved, forward_plan, tiled
from andrea_triton.problem import make_problem
from andrea_triton.spec import make_spec
from tests.launch import stub_cuda

ROOT = Path(__file__).parents[2]
CALLS = """
import json, os, sys
from tests.launch.stub_cuda import pretend
pretend()
from andrea_triton import testing
from andrea_triton.errors import AndreaError
from tests.launch.test_gpu_launch import FP16, PLAIN, attend, on_device

def call(changes):
    for name, value in changes.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    with on_device(0, True, []):
        try:
            attend(testing.make_inputs(PLAIN, FP16))
            print("started")
        except AndreaError as error:
            print(type(error).__name__, error)

for i, changes in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
            os.dup2(os.open(f"{sys.argv[2]}/{i}.{name}", os.O_WRONLY | os.O_CREAT), stream.fileno())
        call(changes)
        sys.exit()
    os.wait()
"""


def forward(dtype: torch.dtype = torch.float16, D: int = 16) -> Launch:
    """The forward's launch with its smallest tiles."""
    q = torch.zeros(1, 1, 16, D, dtype=dtype)
    problem = make_problem(q, q, q, make_spec(causal=True))
    rows = [torch.zeros(1, 1, 16) for _ in range(3)]
    (launch,) = forward_plan(q, q, q, Saved(q, *rows), problem, "sm_80", "ieee")
    return tiled(launch, problem, launch.configs[-1])


def interpreted(q: torch.Tensor) -> torch.Tensor:
    out = attention(q, q, q, causal=True, backend="interpreter")
    assert isinstance(out, torch.Tensor)
    return out


CHILDREN: dict[str, tuple[dict[str, str | None], str, str]] = {
    "no compiler": ({"PATH": "/nowhere", "CC": None}, "Failed to find C compiler", "install gcc"),
    "a compiler that fails": ({"CC": "/bin/false"}, "exit status 1", "install gcc"),
    "a compiler that is not there": ({"CC": "/nowhere/gcc"}, "/nowhere/gcc", "install gcc"),
    "a cache that cannot be made": ({"TRITON_CACHE_DIR": "/dev/null/cache"}, "Not a directory", "set TRITON_CACHE_DIR"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What the first call prints on each machine, and what it complains of: forks of one process that has the stub driver."""
    if stub_cuda.compiler() is None:
        pytest.skip("no C compiler with Python's headers, so there is no stub driver")
    folder = tmp_path_factory.mktemp("driver")
    stub_cuda.build(folder)
    changes = [{"TRITON_CACHE_DIR": str(folder / name), **changes} for name, (changes, *_) in CHILDREN.items()]
    command = [sys.executable, "-c", CALLS, json.dumps(changes), str(folder)]
    environment = {**os.environ, **stub_cuda.environment(folder)}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300, check=True)
    return {name: ((folder / f"{i}.out").read_text(), (folder / f"{i}.err").read_text()) for i, name in enumerate(CHILDREN)}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_machine_that_lacks_something(said: dict[str, tuple[str, str]], name: str) -> None:
    """The first call gives one error: what is missing, what to do, and that backend='torch' does without."""
    (_, cause, advice), (printed, complaints) = CHILDREN[name], said[name]
    assert printed.startswith("CompileError forward cannot be started on cuda:0"), printed + complaints
    assert cause in printed and advice in printed and printed.rstrip().endswith("or backend='torch'.")
    assert "Traceback" not in complaints


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    def put(self: Any, *args: Any, **keywords: Any) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    with monkeypatch.context() as patch, pytest.raises(CompileError) as error:
        patch.setattr(triton.runtime.cache.FileCacheManager, "put", put)
        compiler.compiled(forward(), compiler.gpu_target("sm_80"))
    assert os.strerror(number) in str(error.value)
    assert f"{tmp_path}/cache: make room there, or set TRITON_CACHE_DIR" in str(error.value)
    assert compiler.compiled(forward(), compiler.gpu_target("sm_80")).asm["cubin"], "what was left there harms no later call"


def test_every_known_fault_has_a_way_out() -> None:
    assert "install gcc" in way_out(FileNotFoundError(2, "No such file or directory", "gcc"))
    assert "TRITON_CACHE_DIR" in way_out(FileNotFoundError(2, "No such file", f"{triton.knobs.cache.dir}/x"))
    assert "driver for this device" in way_out(RuntimeError("0 active drivers ([]). There should only be one."))
    assert "3.6 to 3.9 are tested" in way_out(RuntimeError("PassManager::run failed"))


def test_a_card_that_the_compiler_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompileError, match=r"(?s)forward did not compile for hip gfx803 .*Way out: .*, or backend='torch'"):
        compiler.compiled(forward(), compiler.gpu_target("gfx803"))
    capfd.readouterr()  # the compiler's own words


def test_what_has_words_of_its_own_passes() -> None:
    for error in (ShapeError("own words"), OutOfResources(2, 1, "shared memory")):
        with pytest.raises(type(error)) as caught, explained("never seen"):
            raise error
        assert caught.value is error


# Triton's insides as another version may have them: a name gone, a function with other parameters.
MOVED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "interpreter without a rewrite": lambda patch: patch.delattr(interpreter.interpreter.InterpretedFunction, "rewrite"),
    "interpreter's scope": lambda patch: patch.setattr(interpreter.interpreter, "_patch_lang", lambda: None),
    "interpreter's grid": lambda patch: patch.delattr(interpreter.interpreter.InterpreterBuilder, "set_grid_dim"),
}


@pytest.mark.parametrize("what", MOVED)
@pytest.mark.parametrize("version", ["3.10.0", "4.1.0+git", "3.5.1"])
def test_an_interpreter_that_has_changed(monkeypatch: pytest.MonkeyPatch, what: str, version: str) -> None:
    monkeypatch.setattr(interpreter, "_python", {})
    monkeypatch.setattr(triton, "__version__", version)
    MOVED[what](monkeypatch)
    with pytest.raises(UnsupportedError) as error:
        interpreted(torch.randn(1, 1, 4, 8))
    assert f"not supported by Triton {version}: 3.6 to 3.9 are tested" in str(error.value)
    assert "pip install 'triton>=3.6,<3.10', or backend='torch'" in str(error.value)


def test_with_a_tested_triton_an_error_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_python", {})
    monkeypatch.delattr(interpreter.interpreter.InterpretedFunction, "rewrite")
    with pytest.raises(AttributeError, match="rewrite"):
        interpreted(torch.randn(1, 1, 4, 8))


class MovedKernel:
    """A compiled kernel without what start.py wants of it."""

    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)


@pytest.mark.parametrize(
    "kernel",
    [MovedKernel(), MovedKernel(_init_handles=lambda: None), MovedKernel(_init_handles=lambda: None, run=lambda: None)],
    ids=["not loaded so", "not run so", "other arguments"],
)
def test_a_launcher_that_has_changed(monkeypatch: pytest.MonkeyPatch, kernel: MovedKernel) -> None:
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    monkeypatch.setattr(compiler, "compiled", lambda launch, where: kernel)
    monkeypatch.setattr(target, "gpu_target", lambda: SimpleNamespace(arch=80))
    monkeypatch.setattr(target, "current", lambda device: threading.Lock())
    monkeypatch.setattr(target, "stream", lambda device: 0)
    monkeypatch.setattr(start, "_kernels", {})
    q = torch.zeros(1, 1, 16, 16)
    problem, launch = make_problem(q, q, q, make_spec()), forward()
    with pytest.raises(UnsupportedError, match=r"not supported by Triton 3\.10\.0: 3\.6 to 3\.9 are tested"):
        start.go([start.ready(launch, problem, {})], (), problem)


def test_a_triton_without_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one too old for this: nothing else of the library needs it."""
    backends.launcher.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    monkeypatch.delitem(sys.modules, "andrea_triton.launch.run")
    monkeypatch.delattr("andrea_triton.launch.run")
    monkeypatch.setitem(sys.modules, "andrea_triton.launch.start", None)
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(UnsupportedError, match=r"not supported by Triton 3\.2\.0: 3\.6 to 3\.9 are tested"):
        interpreted(q)
    assert attention(q, q, q, causal=True).isfinite().all()
    backends.launcher.cache_clear()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_interprets() -> None:
    """The child has that thread no more, and must not wait for it, nor keep the language as it was changed for it."""
    q, done, before = torch.randn(1, 1, 20, 16), threading.Event(), torch.get_num_threads()
    wanted = interpreted(q)
    dense = attention(q, q, q, causal=True, backend="reference")

    def work() -> None:
        while not done.is_set():
            interpreted(q)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        torch.set_num_threads(1)  # with more, torch's own attention waits forever in a forked child
        for _ in range(3):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                try:
                    same = torch.equal(interpreted(q), wanted)
                    os._exit(0 if same and torch.equal(attention(q, q, q, causal=True, backend="reference"), dense) else 3)
                finally:
                    os._exit(4)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        thread.join()
        torch.set_num_threads(before)


def test_a_thread_compiles_while_another_interprets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter changes the language that the compiler reads."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    q, errors, done = torch.randn(1, 1, 20, 16), list[str](), threading.Event()
    wanted = interpreted(q)

    def work() -> None:
        while not done.is_set():
            try:
                assert torch.equal(interpreted(q), wanted)
            except BaseException as error:
                errors.append(repr(error))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for dtype in (torch.float16, torch.float32):
            assert compiler.compiled(forward(dtype), compiler.gpu_target("sm_80")).asm["cubin"]
    finally:
        done.set()
        thread.join()
    assert errors == []
