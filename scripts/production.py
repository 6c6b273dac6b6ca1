"""Heads that were found superfluous, gone from the folder that is served: the steps of docs/production.md, measured.

    python scripts/production.py tinyshakespeare.txt                       # a small Llama, trained here for minutes
    python scripts/production.py text.txt --model DIR --remove 4           # a model of yours, a folder of transformers
    python scripts/production.py text.txt --model DIR --merge --heal 200   # merge KV heads instead of removing heads

Ranks the heads on the text, removes as many of every layer or merges KV heads, trains some steps, saves, and reads the
folder in a new process with plain transformers; then in ONNX Runtime and OpenVINO, where they are installed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import headwise as hw

LENGTH, WINDOWS = 256, 8  # tokens of a window, and windows that the loss is computed on
LENGTHS = ((1, 7), (2, 33), (3, 64))  # batch and tokens that exported models are run with
MOST = 1e-4  # difference of logits, which are some tens

# What a server does that knows nothing of headwise: logits of the ids, and what greedy decoding writes.
SERVER = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
ids = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    logits = model(ids).logits
    written = model.generate(ids[:1], max_new_tokens=16, do_sample=False, pad_token_id=0)
torch.save({"logits": logits, "written": written}, sys.argv[3])
assert "headwise" not in sys.modules
"""


def windows(ids: Tensor, length: int, count: int, *, seed: int) -> Tensor:
    """Windows [count, length] at random places."""
    if len(ids) <= length:
        raise SystemExit(f"the text has {len(ids)} tokens, expected more than {length}")
    starts = torch.randint(len(ids) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean loss of the next token."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def trained(ids: Tensor, steps: int) -> nn.Module:
    """A Llama of four layers of eight heads, keys and values shared by two, on bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=24, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    batches = [windows(ids, LENGTH // 2, 16, seed=i) for i in range(steps)]
    model = LlamaForCausalLM(config)
    hw.edit.heal(model, batches, loss_of, steps, lr=3e-3, watch=progress("training", steps))
    return model.eval()


def progress(what: str, steps: int) -> Callable[[Any], None]:
    """A function that is called after each step, and says how many are done."""
    done = 0

    def show(_: Any) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty() or done == steps:
            print(f"\r{what}: {done} of {steps} steps", end="\n" if done == steps else "", file=sys.stderr, flush=True)

    return show


def measured(name: str, model: nn.Module, held: Tensor) -> dict[str, Any]:
    """One row of the table: sizes, loss on held-out text and tokens that `generate` writes in a second."""
    config = model.config
    with torch.no_grad():
        loss = sum(float(loss_of(model, ids[None])) for ids in held) / len(held)
        prompt = held[:1, :32]
        options: dict[str, Any] = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
        times = []
        for _ in range(3):
            start = time.perf_counter()
            model.generate(prompt, **options)
            times.append(time.perf_counter() - start)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = next(model.parameters()).element_size()
    return {
        "model": name,
        "heads": config.num_attention_heads,
        "KV heads": config.num_key_value_heads,
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "KV bytes a token": f"{2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * size:,}",
        "loss": f"{loss:.4f}",
        "tokens a second": f"{64 / min(times):.0f}",
    }


def served(folder: Path, model: nn.Module, ids: Tensor) -> str:
    """Whether plain transformers, in a process without headwise, computes and writes the same from the folder."""
    with tempfile.TemporaryDirectory() as place:
        given, found = Path(place) / "ids.pt", Path(place) / "found.pt"
        torch.save(ids, given)
        subprocess.run([sys.executable, "-c", SERVER, str(folder), str(given), str(found)], check=True)
        theirs = torch.load(found, weights_only=True)
    with torch.no_grad():
        logits = model(ids).logits
        written = model.generate(ids[:1], max_new_tokens=16, do_sample=False, pad_token_id=0)
    difference = float((logits - theirs["logits"]).abs().max())
    if difference > MOST or not torch.equal(written, theirs["written"]):
        raise SystemExit(f"{folder}: plain transformers computes other logits, by {difference:.1e}, or another text")
    return f"largest difference of logits {difference:.1e}; the same text"


class Logits(nn.Module):
    """ids [b, n] → logits [b, n, vocab], without caches: what is exported."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return found


def exported(folder: Path, ids: Tensor) -> list[tuple[str, str]]:
    """The folder as plain transformers reads it, in the runtimes that are installed: differences at three sizes."""
    plain = Logits(AutoModelForCausalLM.from_pretrained(folder)).eval()
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    example = ids[:2, :11].contiguous()

    def onnx() -> Callable[[Tensor], Any]:
        import onnxruntime

        names = {"input_names": ["ids"], "output_names": ["logits"]}
        with torch.no_grad():
            program = torch.onnx.export(
                plain, (example,), dynamo=True, dynamic_shapes=(dynamic,), verbose=False, **names
            )
        program.save(folder / "model.onnx")
        session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        return lambda x: session.run(None, {"ids": x.numpy()})[0]

    def openvino() -> Callable[[Tensor], Any]:
        import openvino

        with torch.no_grad():
            program = torch.export.export(plain, (example,), dynamic_shapes=(dynamic,))
        converted = openvino.convert_model(program)
        compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return lambda x: compiled(x.numpy())[0]

    rows = []
    for name, make in (("ONNX Runtime", onnx), ("OpenVINO", openvino)):
        try:
            run = make()
        except ImportError as error:
            rows.append((name, f"not tried: {error}"))
            continue
        worst = 0.0
        for batch, length in LENGTHS:
            x = ids[:batch, :length].contiguous()
            with torch.no_grad():
                worst = max(worst, float((plain(x) - torch.as_tensor(run(x))).abs().max()))
        if worst > MOST:
            raise SystemExit(f"{name}: its logits differ by {worst:.1e}, expected at most {MOST}")
        sizes = ", ".join(f"{batch} × {length}" for batch, length in LENGTHS)
        rows.append((name, f"largest difference of logits {worst:.1e}, at {sizes} tokens"))
    return rows


def main(arguments: list[str] | None = None) -> None:
    """All steps, for a text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="UTF-8; nine tenths rank heads and train, the rest is held out")
    parser.add_argument("--model", type=Path, help="a folder of transformers; default: a small Llama, trained here")
    parser.add_argument("--steps", type=int, default=400, help="training steps of the small Llama")
    parser.add_argument("--remove", type=int, default=2, help="query heads of each layer; whole KV heads go with them")
    parser.add_argument("--merge", action="store_true", help="merge pairs of KV heads instead of removing heads")
    parser.add_argument("--heal", type=int, default=100, help="training steps after that")
    parser.add_argument("--out", type=Path, default=Path("production"), help="a new folder for the model")
    args = parser.parse_args(arguments)

    text = args.text.read_text(encoding="utf-8")
    if args.model is None:
        ids = torch.tensor(list(text.encode()))  # bytes are the tokens of the model that is trained here
    else:
        ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[0]
    split = len(ids) * 9 // 10
    learned, held = ids[:split], windows(ids[split:], LENGTH, WINDOWS, seed=1)
    if args.model is None:
        model = trained(learned, args.steps)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    rows = [measured("as found", model, held)]

    if args.merge:
        print(hw.edit.merge_kv(model, model.config.num_key_value_heads // 2, method="svd"))
    else:
        batches = [ids[None] for ids in windows(learned, LENGTH, WINDOWS, seed=2)]
        importance = hw.analysis.gradient_importance(model, batches, loss_of)
        # Whole KV heads go: those whose query heads matter least together.
        group = model.config.num_attention_heads // model.config.num_key_value_heads
        least = {}
        for layer, values in enumerate(importance.column):
            order = torch.as_tensor(values).unflatten(0, (-1, group)).sum(-1).argsort()
            least[layer] = [int(kv) * group + i for kv in order for i in range(group)][: args.remove]
        print(hw.edit.prune(model, least, uniform=True))
    rows.append(measured("merged" if args.merge else "pruned", model, held))
    if args.heal:
        batches = [windows(learned, LENGTH // 2, 16, seed=10_000 + i) for i in range(args.heal)]
        hw.edit.heal(model, batches, loss_of, args.heal, lr=3e-4, watch=progress("healing", args.heal))
        rows.append(measured(f"after {args.heal} steps", model.eval(), held))

    hw.edit.save_pruned(model, args.out)
    print("\n| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row.values()) + " |")
    sizes = json.loads((args.out / "config.json").read_text())
    print(f"\n{args.out}: {sizes['num_attention_heads']} heads, {sizes['num_key_value_heads']} KV heads in config.json")
    print(f"plain transformers: {served(args.out, model, held[:, :64])}")
    for name, found in exported(args.out, held[:, :64]):
        print(f"{name}: {found}")


if __name__ == "__main__":
    main()
