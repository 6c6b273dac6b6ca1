"""Supervised fine-tuning of TRL on packed sequences, and models that accelerate has dispatched.

`make trl` installs both in a folder of their own.
"""

import warnings

import pytest
import torch
from torch import nn

import headwise as hw

accelerate = pytest.importorskip("accelerate", reason="make trl installs accelerate and TRL")
pytestmark = pytest.mark.thorough


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
            intermediate_size=40, max_position_embeddings=128,
        )
    )  # fmt: skip


def trained(folder, callbacks=(), attached=False):
    """The losses of three steps on packed sequences."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    generator = torch.Generator().manual_seed(1)
    packed = {
        "input_ids": [torch.randint(3, 61, (16,), generator=generator).tolist() for _ in range(7)],
        "seq_lengths": [[5, 11], [7, 3, 6], [2, 14], [16], [3, 13], [8, 8], [1, 15]],
    }
    # With a name, as hashes of tables need pickles of them, which not every pyarrow allows.
    rows = Dataset(InMemoryTable(pyarrow.table(packed)), fingerprint="packed")
    given = SFTConfig(
        output_dir=str(folder), packing=True, padding_free=True, max_length=16, max_steps=3, logging_steps=1,
        per_device_train_batch_size=1, report_to="none", use_cpu=True, bf16=False, seed=0, save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    model = llama()
    trainer = SFTTrainer(
        model, given, train_dataset=rows, processing_class=tokenizer,
        callbacks=list(callbacks),
    )  # fmt: skip
    handle = hw.attach(model) if attached else None
    trainer.train()
    assert handle is None or (len(handle.attached) == 2 and not handle.skipped)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.filterwarnings("ignore")
def test_packed_training_of_trl_is_the_same_watched_and_attached(tmp_path):
    pytest.importorskip("trl")
    want = trained(tmp_path)
    callback = hw.telemetry.trainer_callback(measures=["entropy", "max_logit"])
    assert trained(tmp_path, [callback]) == pytest.approx(want, abs=1e-4)
    assert callback.record.ledger.steps == 3
    assert callback.record.totals.numbers.isfinite().all()
    assert not callback.record.remarks
    assert trained(tmp_path, attached=True) == pytest.approx(want, abs=1e-4)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), (torch.randn(2, 5, 16),)


def decoder():
    return llama().eval(), (torch.randint(3, 61, (2, 7)),)


# accelerate cannot offload nn.MultiheadAttention, whose own code reads the weights of its parts.
@pytest.mark.parametrize(("kind", "dispatched"), [(encoder, "dispatch"), (decoder, "dispatch"), (decoder, "offload")])
@torch.no_grad()
def test_a_dispatched_model_is_computed_and_watched(kind, dispatched):
    model, args = kind()
    wanted = model(*args)
    if dispatched == "dispatch":
        model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    else:
        model = accelerate.cpu_offload(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hw.attach(model) as handle:
            found = model(*args)
            assert len(handle.attached) == 2
            assert not handle.skipped
        with hw.watch(model, measures=["entropy"]) as record:
            again = model(*args)
    assert record.latest["entropy"].shape[0] == 2
    assert not record.unwatched
    for one in (found, again, model(*args)):
        torch.testing.assert_close(getattr(one, "logits", one), getattr(wanted, "logits", wanted), atol=1e-5, rtol=1e-5)
