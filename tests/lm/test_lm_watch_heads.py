"""A training that is watched is the same training, and its record says what the heads did."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise.analysis.history import HeadHistory
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.checkpoint import MODEL_FILE, read
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import Corpus
from headwise.lm.train import TRAINING_FILE, Outcome, TrainingStep, train
from headwise.lm.watch_heads import HEADS_FILE, HeadWatcher
from headwise.map.attention import attend
from headwise.nn.registry import design_of, names

SMALL: dict[str, Any] = {
    "d_model": 20, "num_layers": 2, "num_heads": 5, "d_ff": 23, "context": 19, "dropout": 0.1, "batch_size": 3,
    "warmup": 3, "seed": 5, "precision": "float32", "steps": 7, "eval_every": 3,
}  # fmt: skip
CAUSAL = [name for name in names() if design_of(name).takes_mask]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [
        "the heroes ",
        "of the marsh ",
        "drank three bowls, ",
        "and crossed the ridge.\n",
        "武松打虎。",
        "林冲上山\n",
    ]
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(random.Random(1).choices(words, k=300)), encoding="utf-8")
    return path


def run(file: Path, out: Path, **options: Any) -> tuple[Outcome, list[float]]:
    seen: list[TrainingStep] = []
    outcome = train([file], out, **(SMALL | {"watch": seen.append} | options))
    return outcome, [progress.loss for progress in seen]


def content(folder: Path) -> list[dict[str, Any]]:
    """The record without times."""
    lines = [json.loads(line) for line in (folder / HEADS_FILE).read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def watcher(file: Path, folder: Path, **changes: Any) -> HeadWatcher:
    corpus = Corpus.read([file], context=19)
    torch.manual_seed(2)
    config = DecoderConfig(corpus.tokenizer.vocab_size, 20, 2, 5, d_ff=23, context=19)
    decoder = Decoder(replace(config, **changes))
    return HeadWatcher(folder, decoder, corpus, corpus.heldout_windows(19), {"seed": 2}, None)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_watched_training_is_bit_for_bit_the_same(file: Path, tmp_path: Path, precision: str) -> None:
    plain, losses = run(file, tmp_path / "plain", precision=precision)
    watched, same = run(file, tmp_path / "watched", precision=precision, watch_heads=True)
    assert same == losses
    assert watched.heldout == plain.heldout
    for name in (MODEL_FILE, TRAINING_FILE):
        (one, _), (other, _) = read(tmp_path / "plain" / name), read(tmp_path / "watched" / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    assert not (tmp_path / "plain" / HEADS_FILE).exists()
    assert [line["step"] for line in content(tmp_path / "watched")[1:]] == [0, 3, 6, 7]


def test_a_look_leaves_the_model_and_the_generator_as_they_were(file: Path, tmp_path: Path) -> None:
    watching = watcher(file, tmp_path)
    decoder = watching._decoder.train()
    weights = {name: x.clone() for name, x in decoder.state_dict().items()}
    state = torch.get_rng_state()
    watching.look(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert decoder.training
    assert all(x.grad is None for x in decoder.parameters())
    assert all(torch.equal(x, weights[name]) for name, x in decoder.state_dict().items())


@pytest.mark.thorough
def test_what_a_look_says_is_so_by_dense_formulas(file: Path, tmp_path: Path) -> None:
    watching = watcher(file, tmp_path)
    decoder, ids = watching._decoder.eval(), watching._ids
    with torch.no_grad():
        for block in decoder.blocks:  # sharper than at random, so that entropies differ
            block.attention.q_proj.weight.mul_(4.0)  # type: ignore[union-attr]
        look = watching.look(3)
        outputs = [[], []]  # type: ignore[var-annotated]
        for layer, block in enumerate(decoder.blocks):
            block.attention.o_proj.register_forward_pre_hook(  # type: ignore[union-attr]
                lambda module, args, layer=layer: outputs[layer].append(args[0])
            )
        maps = decoder.hidden(ids, return_maps=True)[1]
    weights = torch.stack(
        [torch.stack([amap[i] for i in range(len(ids))]) for amap in maps]
    ).double()  # [l, b, h, n, n]
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1).mean((1, 3))
    np.testing.assert_allclose(look.passage["broad"], entropy.numpy(), atol=1e-5)
    previous = weights.diagonal(-1, -2, -1).mean((1, 3))
    np.testing.assert_allclose(look.passage["previous"], previous.numpy(), atol=1e-5)
    heads = [x[0].flatten(0, 1).unflatten(-1, (5, 4)).transpose(0, 1).double() for x in outputs]
    flat = torch.cat([x - x.mean(1, keepdim=True) for x in heads])  # [10, tokens, 4]
    inner = torch.einsum("gtd,hte->ghde", flat, flat).square().sum((2, 3))
    cka = inner / (inner.diagonal()[:, None] * inner.diagonal()).sqrt()
    others = ~torch.eye(10, dtype=torch.bool)
    assert look.alike["cka"].mean == pytest.approx(cka[others].mean().item(), abs=1e-5)
    inside = others & (torch.arange(10)[:, None] // 5 == torch.arange(10) // 5)
    assert look.alike["cka"].within == pytest.approx(cka[inside].mean().item(), abs=1e-5)
    best = cka.fill_diagonal_(-1).max(1)
    names = [f"L{i // 5}H{i % 5}" for i in best.indices.tolist()]
    assert [name for name, _ in look.alike["cka"].nearest] == names
    assert [x for _, x in look.alike["cka"].nearest] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.thorough
def test_a_head_that_is_made_to_look_back_by_one_has_that_role(file: Path, tmp_path: Path) -> None:
    watching = watcher(file, tmp_path, d_model=64, num_heads=2)
    attention: Any = watching._decoder.blocks[0].attention
    assert watching.look(0).labels[0][1] == []
    before = attention.forward
    attention.forward = lambda x, *more, **options: _planted(before, x, *more, **options)
    assert "previous" in watching.look(1).labels[0][1]
    assert watching.look(1).repeats["previous"][0, 1] > 0.99


def _planted(before: Any, x: torch.Tensor, *more: Any, **options: Any) -> Any:
    """The layer's output, with a map whose head 1 looks at the token before."""
    y = before(x, *more, **options)
    if not options.get("return_map"):
        return y
    b, n, _ = x.shape
    place = torch.eye(n).expand(b, 2, n, n)
    k = torch.stack([torch.zeros(b, n, n), 40.0 * place[:, 1].roll(1, -1)], 1)
    q = place * n**0.5
    return y[0], attend(q, k, k, mask=options["mask"], return_map=True)[1]


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 3, 5, 6])
def test_a_resumed_run_goes_on_with_the_record(file: Path, tmp_path: Path, step: int) -> None:
    def stop(progress: TrainingStep) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    run(file, tmp_path / "whole", watch_heads=True)
    with pytest.raises(KeyboardInterrupt):  # as a kill: nothing is saved beyond the last evaluation
        run(file, tmp_path / "parts", watch_heads=True, watch=stop)
    run(file, tmp_path / "parts", watch_heads=True)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


@pytest.mark.thorough
def test_looks_beyond_the_saved_step_are_taken_again(file: Path, tmp_path: Path) -> None:
    """Killed between the record and the checkpoint, the record is ahead."""

    def keep(progress: TrainingStep) -> None:
        if progress.step == 4:
            shutil.copy(tmp_path / "run" / TRAINING_FILE, tmp_path / "early")

    run(file, tmp_path / "run", watch_heads=True, watch=keep)
    whole = content(tmp_path / "run")
    shutil.copy(tmp_path / "early", tmp_path / "run" / TRAINING_FILE)
    run(file, tmp_path / "run", watch_heads=True)
    assert content(tmp_path / "run") == whole


@pytest.mark.thorough
def test_a_record_of_another_run_is_replaced_and_a_broken_one_told(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path, watch_heads=True, steps=3)
    run(file, tmp_path, resume=False)  # another run in the folder, not watched
    outcome, _ = run(file, tmp_path, watch_heads=True, resume=False, steps=4)
    assert outcome.finished
    record = HeadHistory.read(tmp_path / HEADS_FILE)
    assert record.steps.tolist() == [0, 3, 4]
    assert record.about["settings"]["steps"] == 4
    path = tmp_path / HEADS_FILE
    path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"heads\.jsonl' cannot be read: line 4"):
        run(file, tmp_path, watch_heads=True, steps=4)


@pytest.mark.thorough_except("multi_head")
@pytest.mark.parametrize("design", CAUSAL)
def test_every_design_can_be_watched(file: Path, tmp_path: Path, design: str) -> None:
    sizes = {"d_model": 24, "num_heads": 6, "num_kv_heads": 2 if design == "gqa" else None}
    run(file, tmp_path, design=design, watch_heads=True, steps=2, eval_every=2, **sizes)
    record = HeadHistory.read(tmp_path / HEADS_FILE)
    assert record.steps.tolist() == [0, 2]
    assert record.shape[0] == 2
    for values in (record.passage("broad"), record.repeats("induction")):
        assert values.shape == (2, *record.shape)
        assert np.isfinite(values).all()
        assert (values[0] != values[1]).any()
    assert str(record).count("\n") == 1 + np.prod(record.shape)


def test_layers_that_differ_in_heads_are_named(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"watch_heads: layers have \[2, 5\] heads"):
        watcher(file, tmp_path, layers=({"num_heads": 5}, {"num_heads": 2}))
