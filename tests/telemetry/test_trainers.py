import gc
import importlib.util
import sys
import weakref

import pytest
import torch
from watched_models import ids, mixed, transformers_model, x

import headwise as hw
from headwise.kernels import events
from headwise.telemetry.watching import TrainingRecord


@pytest.mark.thorough
def test_steps_of_a_trainer_gather_forwards_and_clip():
    model, seen = mixed().train(), []

    class Lines:
        target = "here"

        def write(self, summary):
            seen.append(summary.step)

        def close(self):
            seen.append("closed")

    keeper = TrainingRecord(0.5, [Lines()], {"every": 2, "measures": ["max_logit"]})
    keeper.begin(model, 0)
    before = model.blocks[0].attention.q_proj.weight.clone()
    for _ in range(3):
        model(x(seed=1))
        model(x(seed=2))
        model.eval()(x(seed=3))  # an evaluation is no part of it
        model.train()
        keeper.end_step()
    keeper.end()
    assert seen == [0, 2, "closed"]
    assert not keeper.record.active
    assert not torch.equal(model.blocks[0].attention.q_proj.weight, before)


def test_steps_are_numbered_as_those_of_the_trainer():
    model, keeper = mixed().train(), TrainingRecord(None, [], {"every": 2, "measures": ["max_logit"]})
    keeper.begin(model, 3)  # resumed from a checkpoint
    for _ in range(3):
        model(x())
        keeper.end_step()
    model(x())  # a step that fails, of which the trainer says nothing
    keeper.begin(model, 0)  # the same trainer once more
    for _ in range(2):
        model(x())
        keeper.end_step()
    keeper.end()
    assert keeper.record.history.steps == [4, 6, 8]
    with pytest.raises(hw.ConfigError, match=r"start\(step=8\): expected at least 9, the step that is next"):
        keeper.record.start(8)
    with pytest.raises(hw.ConfigError, match=r"start\(step=9.5\): expected a whole number"):
        keeper.record.start(9.5)
    assert keeper.record.start(torch.tensor(10)).ledger.index == 10
    model(x())
    with pytest.raises(hw.ConfigError, match=r"start\(step=12\): step 10 has numbers already; end it with"):
        keeper.record.start(12)
    keeper.end()


def test_run_that_failed_is_not_watched_any_more_when_another_model_is_trained():
    keeper = TrainingRecord(None, [], {"measures": ["max_logit"]})
    first, second = mixed().train(), mixed().train()
    kept, before = weakref.ref(first), len(events.subscribers)
    keeper.begin(first, 0)
    first(x())
    del first
    keeper.begin(second, 0)
    gc.collect()
    assert kept() is None
    assert len(events.subscribers) == before
    keeper.end()


@pytest.mark.filterwarnings("ignore")
def test_trainer_of_transformers_keeps_a_record(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("Trainer needs accelerate, which is not installed")
    model = transformers_model("gpt2")
    rows = [{"input_ids": row, "labels": row} for row in ids(b=12)]
    callback = hw.telemetry.trainer_callback(
        every=1, measures=["max_logit"], writers=[hw.telemetry.JSONLines(tmp_path / "log")]
    )
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    assert callback.record.history.steps == [0, 1, 2]
    assert len((tmp_path / "log").read_text().splitlines()) == 3
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore")
def test_trainer_of_lightning_keeps_a_record(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mixed()

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train(epochs, resumed):
        callback = hw.telemetry.lightning_callback(measures=["entropy"], tau=None)
        trainer = lightning.Trainer(
            max_epochs=epochs, accumulate_grad_batches=2, callbacks=[callback], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu", default_root_dir=str(tmp_path),
        )  # fmt: skip
        rows = torch.utils.data.DataLoader(list(x(b=8)), batch_size=2)
        trainer.fit(Module(), rows, ckpt_path=resumed)
        return trainer, callback.record

    trainer, record = train(1, None)
    assert record.history.steps == [0, 1]
    assert record.latest.layers[0] == "net.blocks.0.attention"
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert train(2, tmp_path / "saved.ckpt")[1].history.steps == [2, 3]


@pytest.mark.parametrize(
    ("make", "name"), [(hw.telemetry.trainer_callback, "transformers"), (hw.telemetry.lightning_callback, "lightning")]
)
def test_library_that_is_not_there_is_named(make, name, monkeypatch):
    for module in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(hw.ConfigError, match=f"pip install {name}"):
        make()


def test_trainer_says_where_steps_end():
    pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    with pytest.raises(hw.ConfigError, match="steps: the trainer determines where steps end"):
        hw.telemetry.trainer_callback(steps="forward")
