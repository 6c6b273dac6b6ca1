"""`headwise::attend` as operators of PyTorch, in programs that are to run without headwise."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import GAPS, MASKS, SCORES, qkv
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import headwise as hw
from headwise.kernels import decomposed
from headwise.masks import Grid
from headwise.rule import Rule

ATTEND = torch.ops.headwise.attend.default


class Calls(nn.Module):
    """Calls with the same queries, keys and values."""

    def __init__(self, *calls: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        return tuple(call(q, k, v) for call in self.calls)


def targets(program: Any) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def check(program: Any, module: nn.Module, *inputs: Tensor, atol: float = 1e-5) -> None:
    for found, expected in zip(program.module()(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)
        assert found.stride() == expected.stride()


def attending(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: hw.attend(q, k, v, **options)


def kinds(b: int, h: int, n: int, m: int) -> dict[str, dict[str, Any]]:
    """The options of a call for each kind of mask, alone, and for each kind of score."""
    found: dict[str, dict[str, Any]] = {name: {"mask": mask(b, n, m)} for name, mask in MASKS.items()}
    for name, score in (SCORES | GAPS).items():
        scores = tuple(one.mapped(lambda x: x.detach().float()) for one in score(b, h, n, m))
        found[name] = {"mask": MASKS["padded left"](b, n, m), "score": scores}
    return {**found, "windows": {"mask": hw.Causal() & hw.masks.HeadWindows([1, 2, 3, 4, None, 60]), "scale": 0.7}}


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", kinds(2, 6, 17, 23))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_of_every_mask_and_score(name: str, dtype: torch.dtype) -> None:
    (b, h, h_kv, n, m), options = (2, 6, 3, 17, 23), kinds(2, 6, 17, 23)[name]
    q, k, v = qkv(b, h, h_kv, n, m, dtype=dtype)
    rule = Rule(options["mask"], options.get("scale", 8**-0.5), Grid(b, h, n, m), options.get("score", ()))
    found, lse = decomposed.attend(q, k, v, rule.mask, rule.scale, rule.terms(torch.empty(0)), 0.0)
    expected, amap = hw.attend(q, k, v, **options, return_map=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.04)
    torch.testing.assert_close(lse, amap.lse, rtol=0, atol=1e-5)


@pytest.mark.thorough
def test_programs_of_every_mask_and_score() -> None:
    b, h, n, m = 2, 6, 17, 23
    module, inputs = Calls(*(attending(**options) for options in kinds(b, h, n, m).values())), qkv(b, h, 3, n, m)
    program = torch.export.export(module, inputs).run_decompositions()
    assert not any("headwise" in str(target) for target in targets(program))
    check(program, module, *inputs)


@pytest.mark.thorough
def test_sizes_stay_dynamic() -> None:
    module = Calls(
        attending(),
        attending(mask=hw.Causal()),
        attending(mask=hw.Causal() & (hw.Window(3) | hw.masks.Sinks(1)), score=hw.ALiBi([0.1, 0.2, 0.3, 0.4])),
        attending(mask=hw.masks.HeadWindows([1, 2, 3, None])),
        lambda q, k, v: hw.attend(q, k, v, mask=hw.Lengths(torch.full((q.shape[0],), 4), side="right")),
        lambda q, k, v: hw.attend(q, k, v, mask=hw.Documents(torch.arange(q.shape[2]) // 4), score=hw.SoftCap(1.5)),
    )
    shapes = ({0: torch.export.Dim("b", min=1), 2: torch.export.Dim("n", min=1)},) * 3
    program = torch.export.export(module, qkv(3, 4, 2, 9, 9), dynamic_shapes=shapes).run_decompositions()
    for b, n in ((3, 9), (1, 5), (2, 31)):
        check(program, module, *qkv(b, 4, 2, n, n))


@pytest.mark.thorough
def test_calls_that_pytorch_has_become_its_own() -> None:
    """And what users of torch.export choose by its table of decompositions."""
    biased = attending(mask=hw.Causal(), score=hw.Bias(torch.linspace(-1, 1, 9).expand(1, 1, 1, 9).clone()))
    module = Calls(attending(mask=hw.Causal()), biased, attending(score=hw.SinkLogits([0.5, 1.0])))
    inputs = qkv(2, 2, 1, 9, 9)
    program, table = torch.export.export(module, inputs), torch.export.default_decompositions()
    alone = program.run_decompositions({ATTEND: table[ATTEND]})
    fused = torch.ops.aten.scaled_dot_product_attention.default
    assert targets(alone).count(fused) == 2
    assert ATTEND not in targets(alone)
    check(alone, module, *inputs)
    del table[ATTEND]
    for kept in (program, program.run_decompositions(table), program.run_decompositions({})):
        assert targets(kept).count(ATTEND) == 3
        check(kept, module, *inputs)


def test_elsewhere_the_operator_stays_whole() -> None:
    call = attending(mask=hw.Causal())
    for mode in ("real", "fake", "symbolic"):
        assert ATTEND in targets(make_fx(call, tracing_mode=mode)(*qkv(2, 2, 1, 9, 9)))


@pytest.mark.thorough
def test_the_log_sum_exp() -> None:
    maps = [attending(mask=mask, return_map=True) for mask in (hw.Causal(), MASKS["nothing for some"](2, 17, 23))]
    module, inputs = Calls(*(lambda q, k, v, one=one: one(q, k, v)[1].lse for one in maps)), qkv(2, 6, 3, 17, 23)
    program = torch.export.export(module, inputs).run_decompositions()
    assert not any("headwise" in str(target) for target in targets(program))
    check(program, module, *inputs)


@pytest.mark.thorough
def test_dropout_becomes_pytorchs() -> None:
    module = Calls(attending(dropout_p=0.5), attending(dropout_p=0.5, score=hw.SoftCap(3.0)))
    inputs = *qkv(1, 2, 2, 9, 40)[:2], torch.ones(1, 2, 40, 5)
    program = torch.export.export(module, inputs).run_decompositions().module()
    torch.manual_seed(0)
    for found in zip(*(program(*inputs) for _ in range(200)), strict=True):
        torch.testing.assert_close(torch.stack(found).mean(), torch.ones(()), rtol=0, atol=0.02)
        assert torch.stack(found).std() > 0.05


@pytest.mark.thorough
def test_torch_compile_runs_the_kernels() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or graph)(graph, inputs)

    inputs = qkv(2, 2, 1, 9, 9)
    with torch.no_grad():
        torch.compile(attending(mask=hw.Causal()), backend=backend, fullgraph=True)(*inputs)
    assert ATTEND in targets(graphs[0])


@pytest.mark.thorough  # it runs a C++ compiler
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor_compiles_the_operator_after_an_export() -> None:
    code = """
import torch, headwise as hw
class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return hw.attend(q, k, v, is_causal=True) * 3
given = torch.randn(3, 1, 2, 8, 16).unbind(0)
torch.export.export(Layer(), given).run_decompositions()
torch._inductor.config.force_disable_caches = True
print(torch.equal(torch.compile(Layer())(*given), Layer()(*given)))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"
