import json
import sys

import pytest
import torch
from torch import nn
from watched_models import mixed, x

import headwise as hw
from headwise.telemetry.alarms import Alarms, JSONLines
from headwise.telemetry.ledger import Summary
from processes import files_no_larger_than


def summary(values, name="max_logit", step=0, bad=None):
    numbers = torch.tensor(values)[:, None]
    nonfinite = torch.zeros(len(values), 4)
    if bad is not None:
        nonfinite[bad] = torch.tensor([3.0, 2.0, 0.0, 0.0])
    return Summary(step, 1, tuple(("a.b", i) for i in range(len(values))), (name,), numbers, nonfinite)


def findings(alarm_of, *values, name="max_logit"):
    found = []
    alarms = Alarms([alarm_of(found.append)])
    for step, row in enumerate(values):
        alarms.check(summary(row, name, step), nn.Identity())
    return [(one.summary.step, one.heads) for one in found]


def test_alarm_is_told_once_until_it_has_been_well_by_a_margin():
    found = findings(
        lambda then: hw.telemetry.MaxLogitAlarm(10.0, then=then),
        [5.0, 11.0], [12.0, 12.0], [9.5, 9.5], [11.0, 11.0], [8.9, 9.1], [11.0, 11.0],
    )  # fmt: skip
    assert found == [(0, (("a.b", 1),)), (1, (("a.b", 0),)), (5, (("a.b", 0),))]


def test_heads_that_did_not_run_are_neither_ill_nor_well():
    found = findings(lambda then: hw.telemetry.MaxLogitAlarm(10.0, then=then), [11.0], [torch.nan], [11.0])
    assert found == [(0, (("a.b", 0),))]


def test_entropy_and_sink_alarms_look_at_their_sides():
    assert findings(
        lambda t: hw.telemetry.EntropyAlarm(1.0, then=t), [0.9, 1.1], [1.05, 1.1], [0.9, 1.2], name="entropy"
    ) == [(0, (("a.b", 0),))]
    assert findings(lambda t: hw.telemetry.SinkAlarm(0.9, then=t), [0.91, 0.89], name="sink_mass") == [
        (0, (("a.b", 0),))
    ]


@pytest.mark.filterwarnings("ignore::headwise.telemetry.AttentionWarning")
def test_sinks_are_found_behind_padding():
    """The batches that a decoder generates from have their padding before the text."""
    layer = hw.nn.MultiHeadAttention(8, 2).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()  # the same weight on each key in sight
    found = []
    mask = hw.Causal() & hw.Lengths([9, 2, 1], side="right")
    alarms = [hw.telemetry.SinkAlarm(0.4, then=found.append)]
    with torch.no_grad(), hw.watch(layer, alarms=alarms) as record:
        layer(torch.randn(3, 9, 8), mask=mask)
    rows = [1 / (1 + i) for length in (9, 2, 1) for i in range(length)]
    assert record.latest["sink_mass"].flatten().tolist() == pytest.approx([sum(rows) / len(rows)] * 2)
    assert len(found) == 1


def test_alarm_warns_or_raises_with_layer_head_and_number():
    with pytest.warns(hw.telemetry.AttentionWarning, match=r"step 0: a.b head 1: max logit 11, over 10$"):
        Alarms([hw.telemetry.MaxLogitAlarm(10.0)]).check(summary([1.0, 11.0]), nn.Identity())
    with pytest.raises(hw.telemetry.AttentionAlarm, match=r"head 3: max logit 11, over 10; and 2 more heads$"):
        Alarms([hw.telemetry.MaxLogitAlarm(10.0, then="raise")]).check(summary([11.0] * 6), nn.Identity())


def test_model_in_training_meets_the_alarms():
    model, found = mixed(), []
    alarms = [
        hw.telemetry.NonFiniteAlarm(found.append),
        hw.telemetry.DeadHeadAlarm(then=found.append),
        hw.telemetry.SinkAlarm(then=found.append),
    ]
    with hw.watch(model, alarms=alarms) as record:
        model(x())
        assert found == []
        with torch.no_grad():
            model.blocks[0].attention.q_proj.weight[:12].zero_()  # head 0: all scores alike
        model(x())
        z = x()
        z[1, 4, 2] = torch.nan
        model(z)
    dead, *bad = found
    assert dead.heads == (("blocks.0.attention", 0),)
    assert "constant: entropy at 100.00% of its maximum" in dead.message
    assert str(dead) == dead.message  # for then=print
    assert ("blocks.0.attention", 1) in bad[0].heads
    assert "NaN or infinity in queries (12) and keys (12) and values (12)" in bad[0].message
    assert "learned_sink_mass" in record.latest
    assert record.totals.numbers.isfinite().all()  # a step with NaN spoils no sum
    assert record.totals.nonfinite.any()
    assert record.latest.numbers.isnan().any()


@pytest.mark.thorough
def test_alarm_that_raises_does_so_through_the_forward_after_the_numbers_are_kept():
    model = mixed()
    with hw.watch(model, alarms=[hw.telemetry.MaxLogitAlarm(1e-3, then="raise")]) as record:
        with pytest.raises(hw.telemetry.AttentionAlarm):
            model(x())
        model(x())  # told already
    assert record.ledger.steps == 2


def test_alarm_without_its_measure_is_named():
    with pytest.raises(hw.ConfigError, match=r"SinkAlarm.*needs sink_mass"):
        hw.watch(mixed(), measures=["entropy"]).alarm(hw.telemetry.SinkAlarm())


@pytest.mark.parametrize(
    "make",
    [
        lambda: hw.telemetry.MaxLogitAlarm(0.0),
        lambda: hw.telemetry.SinkAlarm(1.5),
        lambda: hw.telemetry.EntropyAlarm(then="shout"),
    ],
)
def test_alarms_that_will_not_do_are_named(make):
    with pytest.raises(hw.ConfigError, match=r"Alarm\("):
        make()


@pytest.mark.thorough
def test_lines_of_json_say_what_the_record_says(tmp_path):
    path = tmp_path / "runs" / "log.jsonl"
    with hw.watch(mixed(), every=2).write_to(hw.telemetry.JSONLines(path)) as record:
        for seed in range(5):
            record.model(x(seed=seed))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert lines == record.history.to_dict()
    assert lines[-1]["layers"]["blocks.0.attention"]["entropy"] == record.latest["entropy"][0, :2].tolist()


def test_nan_is_null_in_json(tmp_path):
    with hw.watch(mixed()).write_to(hw.telemetry.JSONLines(tmp_path / "log")) as record:
        record.model(torch.full((1, 3, 24), torch.nan))
    layer = json.loads((tmp_path / "log").read_text())["layers"]["blocks.0.attention"]
    assert layer["max_logit"] == [None, None]
    assert layer["nonfinite"]["rows"] == [3, 3]
    record.save(tmp_path / "all.json")
    assert json.loads((tmp_path / "all.json").read_text())["latest"]["layers"]["blocks.0.attention"] == layer


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_full_disk_is_told_once_and_the_run_goes_on():
    with hw.watch(mixed()).write_to(hw.telemetry.JSONLines("/dev/full")) as record:
        with pytest.warns(RuntimeWarning, match="could not be written to /dev/full: OSError"):
            record.model(x())
        record.model(x())  # a second warning would be an error here
    assert record.ledger.steps == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the size of files")
def test_half_a_line_is_taken_away_again(tmp_path):
    path = tmp_path / "log"
    writer = JSONLines(path)

    def step(i):
        return Summary(i, 1, (("a", 0),), ("entropy",), torch.tensor([[0.5]]), torch.zeros(1, 4))

    writer.write(step(0))
    with files_no_larger_than(path.stat().st_size + 20), pytest.raises(OSError, match="File too large"):
        writer.write(step(1))
    writer.write(step(2))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2]


class Run:
    name = "run"

    def __init__(self):
        self.logged = []

    def log(self, values):
        self.logged.append(values)


def test_weights_and_biases_gets_a_curve_a_head():
    run = Run()
    with hw.watch(mixed(), measures=["entropy"]).write_to(hw.telemetry.WeightsAndBiases(run)) as record:
        record.model(x())
    (values,) = run.logged
    assert values["entropy/blocks.1.attention/2"] == pytest.approx(record.latest["entropy"][1, 2].item())
    assert values["headwise/step"] == 0
    assert len(values) == 2 + 3 + 4 + 1


def test_tensorboard_gets_a_curve_a_head(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = hw.telemetry.TensorBoard(tmp_path)
    with hw.watch(mixed(), measures=["entropy"]).write_to(writer) as record:
        record.model(x())
        record.model(x(seed=3))
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    curve = events.Scalars("entropy/blocks.1.attention/2")
    assert [event.step for event in curve] == [0, 1]
    assert curve[1].value == pytest.approx(record.latest["entropy"][1, 2].item())


@pytest.mark.parametrize(
    ("make", "package"),
    [(lambda: hw.telemetry.TensorBoard("x"), "tensorboard"), (hw.telemetry.WeightsAndBiases, "wandb")],
)
def test_library_that_is_not_there_is_named(make, package, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(hw.ConfigError, match=f"needs {package}: pip install {package}"):
        make()


def test_what_is_no_writer_is_told():
    with pytest.raises(hw.ConfigError, match="expected a writer"):
        hw.watch(mixed()).write_to("log.jsonl")


def test_memory_does_not_grow_with_the_number_of_steps():
    sizes = []
    with hw.watch(mixed(), history=4) as record:
        for seed in range(12):
            record.model(x(seed=seed, n=5 + seed))
            sizes.append(record.nbytes)
    assert sizes[3] < sizes[4] + 1
    assert len(set(sizes[3:])) == 1
    assert record.history.steps == [8, 9, 10, 11]
    assert record.history["entropy"].shape == (4, 3, 4)
    assert torch.equal(record.history["entropy"][-1].nan_to_num(0.0), record.latest["entropy"].nan_to_num(0.0))
    assert repr(record.history).startswith("History(4 steps, 8 to 11; max_logit")


def test_tables_print_layer_head_and_statistics():
    with hw.watch(mixed(), measures=["entropy"]) as record:
        assert repr(record.table()).startswith("no step measured yet")
        record.model(x())
    lines = repr(record.table()).splitlines()
    assert lines[0] == "step 0"
    assert lines[1].split() == ["layer", "head", "entropy", "(nats)"]
    assert lines[2].split()[:3] == ["0", "blocks.0.attention", "0"]
    assert len(lines) == 2 + 2 + 3 + 4
    assert "<td>1 blocks.1.attention</td><td>2</td>" in record.latest._repr_html_()
    with pytest.raises(hw.ConfigError, match=r"measure='sink_mass': .*expected "):
        record.latest["sink_mass"]
    with pytest.raises(hw.ConfigError, match="layer='nowhere': "):
        record.latest.table.layer("nowhere")
