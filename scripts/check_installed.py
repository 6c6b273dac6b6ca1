"""Check an installed headwise: its kernels compute what PyTorch computes, on every target that runs here.

    python -I scripts/check_installed.py                        # any installation
    python -I scripts/check_installed.py --targets portable avx2   # one that must have these compiled targets

Needs nothing but headwise and what it depends on; `-I` keeps a source tree around it off the path. Prints what it
found; the exit code is 1 if something is wrong.
"""

import argparse
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw
from headwise.kernels.cpu.library import library

BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
MEASURES = ("entropy", "max_logit", "mean_distance", "sink_mass")


def main() -> None:
    """Check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=(), help="the targets that the library must have, no others")
    wanted = set(parser.parse_args().targets)
    found = library()
    print(f"headwise {hw.__version__} in {hw.__file__}, Python {sys.version.split()[0]}, torch {torch.__version__}")
    print(f"compiled targets: {', '.join(found.targets()) or f'none, {found.reason}'}")
    wrong = []
    if wanted and wanted != set(found.targets()):
        wrong.append(f"expected the targets {', '.join(sorted(wanted))}")
    wrong += [f"on PyTorch's kernels: {problem}" for problem in problems("torch_blocks")]
    for target in found.runnable() if found.handle is not None else ():
        with found.using(target):
            here = problems("cpu")
        print(f"{target}: {'wrong' if here else 'runs'}")
        wrong += [f"on target {target}: {problem}" for problem in here]
    if wrong:
        sys.exit("\n".join(wrong))


def problems(kernel: str) -> list[str]:
    """What is wrong with the outputs, gradients and measures of a kernel."""
    wrong = []
    for dtype, bound in BOUND.items():
        for n, causal in ((5, False), (131, True)):
            generator = torch.Generator().manual_seed(n)
            q, k, v = (torch.randn(2, 3, n, 23, generator=generator).to(dtype).requires_grad_() for _ in range(3))
            out, amap = hw.attend(q, k, v, is_causal=causal, kernel=kernel, return_map=True, measures=MEASURES)
            wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
            expected = scaled_dot_product_attention(*wide, is_causal=causal)
            truth = hw.attend(*wide, is_causal=causal, kernel="reference", return_map=True, measures=MEASURES)[1]
            out.float().sum().backward()
            expected.sum().backward()
            pairs = {"output": (out, expected), "gradient of q": (q.grad, wide[0].grad)}
            pairs |= {name: (amap.measured[name], truth.measured[name]) for name in MEASURES}
            for name, (one, other) in pairs.items():
                if not torch.allclose(one.double(), other.double(), rtol=bound, atol=bound):
                    off = (one.double() - other.double()).abs().max().item()
                    wrong.append(f"{name}, {dtype}, {n} tokens{', causal' * causal}: off by {off:.2g}")
    return wrong


if __name__ == "__main__":
    main()
