"""On a CPU with AMX, its tiles and those emulated in C give the same bits: what is tested elsewhere holds here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.kernels.cpu.library import library

ROOT = Path(__file__).parents[2]

RESULTS = """
import hashlib, sys, torch, headwise as hw
from headwise.kernels.cpu.library import library
assert library().target() == "amx", library().target()

def show(name, *tensors):
    whole = hashlib.sha256()
    for x in tensors:
        whole.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    print(name, whole.hexdigest())

MASKS = {"full": None, "causal": hw.Causal(), "window": hw.Causal() & hw.Window(150), "lengths": hw.Lengths([40, 7])}
SIZES = (1, 1, 8, 8), (5, 9, 3, 1), (33, 70, 17, 40), (64, 600, 64, 64), (131, 131, 96, 80), (48, 48, 160, 16)
LARGE = (64, 600, 64, 64), (131, 200, 96, 80), (49, 460, 160, 40)  # float32 is multiplied in parts
CASES = [(torch.bfloat16, *size) for size in SIZES]
CASES += [(dtype, *size) for size in LARGE for dtype in (torch.float32, torch.float16)]
for dtype, n, m, d, d_v in CASES:
    for name, mask in MASKS.items():
        if name == "lengths" and (m < 40 or dtype != torch.bfloat16):
            continue
        g = torch.Generator().manual_seed(n + d)
        q = torch.randn(2, 4, n, d, generator=g).to(dtype).requires_grad_()
        k = torch.randn(2, 2, m, d, generator=g).to(dtype).requires_grad_()
        v = torch.randn(2, 2, m, d_v, generator=g).to(dtype).requires_grad_()
        measures = ["entropy", "max_logit", "mean_distance", "received_mass"]
        for dropout in (0.0, 0.25):
            torch.manual_seed(3)
            out, amap = hw.attend(
                q, k, v, mask=mask, dropout_p=dropout, return_map=True, measures=measures, kernel="cpu"
            )
            grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
            case = f"{dtype} {n} {m} {d} {d_v} {name} {dropout}"
            show(case + " pass", out, amap.lse, *grads, *(amap.measured[one] for one in measures))
        with torch.no_grad():
            x, y = (torch.randn(2, 4, size, 5, generator=g).to(dtype) for size in (m, n))
            tile = amap[:, :, 0 : min(n, 40), 0 : min(m, 90)]
            show(case + " reads", tile, amap @ x, amap.T @ y, amap.pool(4), amap.topk(1)[0])
"""


def results(path: Path) -> list[str]:
    environment = {
        **os.environ, "HEADWISE_NATIVE_LIBRARY": str(path), "HEADWISE_TARGET": "amx", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", RESULTS], env=environment, capture_output=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
@pytest.mark.skipif("amx" not in library().runnable(), reason="this CPU has no tiles, or they are not permitted")
def test_the_cpu_and_the_emulation_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "native"))
    import compile as build

    folder = ROOT / "build" / "emulated-tiles"
    with build.one_at_a_time():
        build.compile_in(folder, "-DHEADWISE_EMULATE_TILES=ON", "-DHEADWISE_TARGETS=portable;amx")
    here, emulated = results(library().path), results(folder / library().path.name)
    assert len(here) > 30
    assert here == emulated
