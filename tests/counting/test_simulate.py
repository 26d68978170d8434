"""The command that simulates, and what it takes for given of a causal call."""

import pytest

from andrea_triton.counting import simulate
from andrea_triton.counting.simulate import main, tile, trips
from andrea_triton.errors import ShapeError
from andrea_triton.launch.configs import Config


@pytest.mark.parametrize("config", [Config(128, 64), Config(64, 64), Config(32, 128), Config(64, 16)], ids=str)
@pytest.mark.parametrize("name", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("length", [512, 1024])
def test_trips_visit_every_tile_that_is_seen(name: str, config: Config, length: int) -> None:
    tiles = [(q, k) for q in range(0, length, config.BLOCK_M) for k in range(0, length, config.BLOCK_N)]
    full = sum(q >= k + config.BLOCK_N - 1 for q, k in tiles)
    seen = sum(q + config.BLOCK_M - 1 >= k for q, k in tiles)
    found = trips(name, length, config, True)
    sums = tuple(map(sum, zip(*found, strict=True)))
    assert sums == ((seen - full, full) if name == "dkdv" else (full, seen - full))
    assert len(found) == length // (config.BLOCK_N if name == "dkdv" else config.BLOCK_M)
    assert sum(map(sum, trips(name, length, config, False))) == len(tiles)


@pytest.mark.parametrize("text", ["delta", "forward:64", "forward:64,x", "forward:1,2,3,4,5,6,7,8,9", ""])
def test_what_is_no_tile_is_refused(text: str) -> None:
    with pytest.raises(ShapeError, match=r"wanted one of forward, dkdv, dq, alone or with numbers"):
        tile(text)


def test_a_tile_is_a_config() -> None:
    assert tile("forward") == ("forward", None)
    assert tile("dkdv:64,64,4,3,0,1,3,1") == ("dkdv", Config(64, 64, 4, 3, False, True, 3, True))


def test_the_command_prints_a_line_for_each_tile(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "SHAPES", ((256, 12),))
    assert main(["sm_80", "dq:64,16,4,1", "dq:128,128,4,8", "--d", "128"]) == 1
    out, err = capsys.readouterr()
    assert "dq" in out and "TFLOP/s" in out and "programs" in out and len(out.splitlines()) == 1
    assert "dq" in err and len(err.splitlines()) == 1
