"""What the exporters make of headwise's layers, and by how much their numbers differ: the table of docs/deploy.md.

    make exporters                                                     # installs them in .venv/exporters, and tests
    PYTHONPATH=.venv/exporters python scripts/exporters.py             # print the table, some minutes
    PYTHONPATH=.venv/exporters python scripts/exporters.py --write     # into docs/deploy.md

Each module is exported once, with a dynamic batch and length, and runs at three sizes in float32.
"""

import argparse
import importlib.metadata
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import blocks
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.nn.registry import DESIGNS

DOC = Path(__file__).parent.parent / "docs" / "deploy.md"
BEGIN, END = "<!-- exporters: python scripts/exporters.py --write -->", "<!-- end of exporters -->"
SIZES = (2, 16), (1, 5), (4, 64)  # batch and length; the first is the one that is exported
LARGEST = SIZES[-1]  # for which ExecuTorch plans its memory
D_MODEL, HEADS, WORDS = 32, 4, 61
Run = Callable[..., Tensor]


class Layer(nn.Module):
    """A layer with causal attention, or with that of padded sequences."""

    def __init__(self, layer: nn.Module, padded: bool = False) -> None:
        super().__init__()
        self.layer, self.padded = layer, padded

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x [b, n, d_model], lengths [b]."""
        mask = hw.Causal() if lengths is None else hw.Causal() & hw.Lengths(lengths)
        found: Tensor = self.layer(x, mask=None if "mask" in self.layer.takes_none_as else mask)
        return found

    def given(self, b: int, n: int) -> tuple[Tensor, ...]:
        """Arguments of that size."""
        x = torch.randn(b, n, D_MODEL)
        return (x, 1 + torch.arange(b) * (n - 1) // max(1, b - 1)) if self.padded else (x,)


class Attached(nn.Module):
    """A model of transformers with headwise's attention."""

    def __init__(self, model: nn.Module, padded: bool = False) -> None:
        super().__init__()
        self.model, self.padded = model, padded
        hw.attach(model)

    def forward(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """ids and real [b, n]."""
        options = {} if real is None else {"attention_mask": real}
        found: Tensor = self.model(input_ids=ids, **options)[0]
        return found

    def given(self, b: int, n: int) -> tuple[Tensor, ...]:
        """Arguments of that size."""
        ids = torch.randint(WORDS, (b, n))
        lengths = 1 + torch.arange(b) * (n - 1) // max(1, b - 1)
        return (ids, (torch.arange(n) < lengths[:, None]).long()) if self.padded else (ids,)


def grouped() -> nn.Module:
    """Grouped keys and rotary positions."""
    return hw.MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=2, rotary=True)


def pruned() -> nn.Module:
    """A layer that has lost two heads."""
    layer = hw.MultiHeadAttention(D_MODEL, HEADS)
    hw.edit.prune(layer, [1, 3])
    return layer


def llama() -> nn.Module:
    """A small random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=D_MODEL, num_hidden_layers=2, num_attention_heads=HEADS,
            num_key_value_heads=2, intermediate_size=48, max_position_embeddings=128, use_cache=False,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    """A small random GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(
        vocab_size=WORDS, n_embd=D_MODEL, n_layer=2, n_head=HEADS, n_positions=128, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(sizes)


def bert() -> nn.Module:
    """A small random BERT."""
    from transformers import BertConfig, BertModel

    sizes = BertConfig(
        vocab_size=WORDS, hidden_size=D_MODEL, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48,
        max_position_embeddings=128,
    )  # fmt: skip
    return BertModel(sizes, add_pooling_layer=False)


ROWS: dict[str, Callable[[], Any]] = {
    "MHA, causal": lambda: Layer(hw.MultiHeadAttention(D_MODEL, HEADS)),
    "MHA, padded": lambda: Layer(hw.MultiHeadAttention(D_MODEL, HEADS), padded=True),
    "GQA and rotary positions, causal": lambda: Layer(grouped()),
    "GQA and rotary positions, padded": lambda: Layer(grouped(), padded=True),
    "MHA, two of four heads pruned": lambda: Layer(pruned()),
    **{f"`{name}`, causal": lambda name=name: Layer(DESIGNS[name].build(D_MODEL, HEADS)) for name in DESIGNS},
    "attached Llama": lambda: Attached(llama()),
    "attached GPT-2": lambda: Attached(gpt2()),
    "attached BERT, padded": lambda: Attached(bert(), padded=True),
}
del ROWS["`multi_head`, causal"]


def made(name: str) -> tuple[Any, Any]:
    """The module of a row, and its program with a dynamic batch and length."""
    torch.manual_seed(0)
    module = ROWS[name]().eval()
    b, n = (torch.export.Dim(axis, min=1, max=most) for axis, most in zip("bn", LARGEST, strict=True))
    given = module.given(*SIZES[0])
    with torch.no_grad():
        shapes = tuple({0: b} if x.ndim == 1 else {0: b, 1: n} for x in given)
        return module, torch.export.export(module, given, dynamic_shapes=shapes)


def decomposed(program: Any, folder: Path) -> Run:
    """The program by PyTorch's core operators."""
    program = program.run_decompositions()
    assert not any("headwise" in str(node.target) for node in program.graph.nodes)
    return program.module()  # type: ignore[no-any-return]


def onnx(program: Any, folder: Path) -> Run:
    """In ONNX Runtime."""
    import onnxruntime

    path = folder / "program.onnx"
    torch.onnx.export(program, dynamo=True, verbose=False).save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return lambda *given: torch.from_numpy(
        session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})[0]
    )


def open_vino(program: Any, folder: Path) -> Run:
    """In OpenVINO, on the CPU in float32."""
    import openvino

    model = openvino.compile_model(openvino.convert_model(program), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda *given: torch.from_numpy(model([x.numpy() for x in given])[0])


def execu_torch(program: Any, folder: Path) -> Run:
    """In ExecuTorch, with its portable kernels."""
    from executorch.exir import EdgeCompileConfig, to_edge
    from executorch.runtime import Runtime

    path = folder / "program.pte"
    # Its check of programs takes the batch of the first tensor of a `split` for the number of tensors, and fixes it.
    edge = to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    path.write_bytes(edge.to_executorch().buffer)
    method = Runtime.get().load_program(path).load_method("forward")
    return lambda *given: method.execute(given)[0]


def aot_inductor(program: Any, folder: Path) -> Run:
    """Compiled by AOTInductor, with PyTorch's attention."""
    attend = torch.ops.headwise.attend.default
    table = {attend: torch.export.default_decompositions()[attend]}
    path, program = str(folder / "program.pt2"), program.run_decompositions(table)
    assert not any("headwise" in str(node.target) for node in program.graph.nodes)
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    return torch._inductor.aoti_load_package(path)  # type: ignore[no-any-return]


COLUMNS: dict[str, tuple[str, Callable[[Any, Path], Run]]] = {  # and the package whose version is printed
    "torch.export": ("torch", decomposed),
    "ONNX Runtime": ("onnxruntime", onnx),
    "OpenVINO": ("openvino", open_vino),
    "ExecuTorch": ("executorch", execu_torch),
    "AOTInductor": ("torch", aot_inductor),
}


def difference(module: Any, run: Run) -> float:
    """The largest one from the module, over all sizes."""
    found = []
    for b, n in SIZES:
        given = module.given(b, n)
        with torch.no_grad():
            found.append((run(*given) - module(*given)).abs().max().item())
    return max(found)


def row(name: str, columns: Iterable[str]) -> list[str]:
    """The cells of a row: a difference, or why there is none."""
    try:
        module, program = made(name)
    except Exception as error:
        return [f"refused: {reason(error)}", *[""] * (len(list(columns)) - 1)]
    cells = []
    for column in columns:
        with tempfile.TemporaryDirectory() as folder:
            try:
                cells.append(f"{difference(module, COLUMNS[column][1](program, Path(folder))):.0e}")
            except Exception as error:
                cells.append(f"refused: {reason(error)}")
    return cells


def reason(error: Exception) -> str:
    """The first sentence of an error that says something."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip() and "TORCH_LOGS" not in line]
    return f"{type(error).__name__}: {lines[0].partition('. ')[0] if lines else ''}"[:200].replace("|", "\\|")


def table(names: Iterable[str], columns: list[str]) -> str:
    """The table in Markdown, and below it why a system refuses a program."""
    versions = [f"{c} {importlib.metadata.version(COLUMNS[c][0]).partition('+')[0]}" for c in columns]
    lines, refused = [["", *versions], ["---"] * (len(columns) + 1)], []
    for name in names:
        cells = row(name, columns)
        print([name, *cells], flush=True)
        lines.append([name, *(cell.partition(":")[0] for cell in cells)])
        refused += [f"- {name}, {cell}\n" for cell in cells if ":" in cell]
    return "".join([*(f"| {' | '.join(line)} |\n" for line in lines), "\n" * bool(refused), *refused])


def main() -> None:
    """Print the table, and write it into the page if asked."""
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("--rows", default="", help="only rows whose names contain one of these, a,b")
    about.add_argument("--columns", default="", help="only columns whose names contain one of these")
    about.add_argument("--write", action="store_true", help="put the table into docs/deploy.md")
    given = about.parse_args()
    warnings.simplefilter("ignore")
    rows, columns = (
        [name for name in names if any(part in name for part in wanted.split(","))]
        for names, wanted in ((ROWS, given.rows), (COLUMNS, given.columns))
    )
    found = table(rows, columns)
    print(found)
    if given.write:
        blocks.write(DOC, BEGIN, END, found)


if __name__ == "__main__":
    main()
