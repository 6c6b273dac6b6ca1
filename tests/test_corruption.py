"""Every kind of file that is read back, damaged in many ways: what was written comes back, or one error names the file.

What has a checksum never comes back as something else.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corruption import damaged
from headwise import ALiBi, AttentionMap, Causal, Dense, Documents, Lengths, SoftCap, attend
from headwise.analysis.head_roles.relations import read_conllu
from headwise.analysis.history import Alike, HeadHistory, HeadLook
from headwise.base.read import write_tensors
from headwise.corpus.passages import Collected, CorpusPassage
from headwise.corpus.sources import Limit, Source, documents, find_sources
from headwise.corpus.tally import Tally, Trouble
from headwise.corpus.units import Settings, Units
from headwise.corpus.work import Measured, Options
from headwise.edit import load_pruned, prune, save_pruned
from headwise.edit.budgets import Budget, read_budget, save_budget
from headwise.errors import HeadwiseError
from headwise.lm.checkpoint import header_of, load_checkpoint, read, save_model, training_state, unpack
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer

TIMES = 200
FEW = 25  # of what transformers reads, which takes longer
STEP = 1 << 10
TOKENIZER = CharTokenizer("水浒武松")
TENSORS = frozenset({"map", "checkpoint", "training state", "manifest", "finished unit"})  # that have a checksum


@dataclass(frozen=True)
class Kind:
    """How a kind of file is written into a folder, giving its path, and how it is read, giving plain values."""

    write: Callable[[Path], Path]
    read: Callable[[Path], Any]


def _map(folder: Path) -> Path:
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 4, 3, 5), torch.randn(2, 2, 7, 5), torch.randn(2, 2, 7, 5)
    mask = (Causal() & Documents([0, 0, 1, 1, 1, 2, 2])) | (Dense(torch.rand(3, 7) < 0.5) & Lengths([3, 5]))
    _, amap = attend(q, k, v, mask=mask, score=(SoftCap(3.0), ALiBi.standard(4)), return_map=True)
    amap.save(folder / "map.safetensors")
    return folder / "map.safetensors"


def _decoder() -> Decoder:
    torch.manual_seed(3)
    return Decoder(DecoderConfig(260, d_model=6, num_layers=1, num_heads=3, d_ff=5, context=7))


def _checkpoint(folder: Path) -> Path:
    save_model(folder / "model.safetensors", _decoder(), TOKENIZER, {"step": 5})
    return folder / "model.safetensors"


def _training(folder: Path) -> Path:
    decoder = _decoder()
    tensors = {f"model.{name}": x for name, x in decoder.state_dict().items()}
    for i, x in enumerate(decoder.parameters()):
        for name, moment in (("step", torch.tensor(3.0)), ("exp_avg", x * 0.5), ("exp_avg_sq", x**2)):
            tensors[f"optimizer.{i}.{name}"] = moment.detach()
    info = {
        "settings": {"seed": 3}, "step": 3, "seconds": 0.5, "best": {"all": 2.5},
        "log": [{"step": 3, "heldout_loss": 2.5}],
    }  # fmt: skip
    write_tensors(folder / "training.safetensors", tensors, header_of(decoder.config, TOKENIZER, info))
    return folder / "training.safetensors"


def _read_training(path: Path) -> Any:
    tensors, header = read(path)
    config, _, info = unpack(header, path)
    decoder = Decoder(config)
    state = training_state(path, tensors, info, decoder.state_dict(), list(decoder.parameters()))
    return state.model, state.optimizer, state.step, state.best, state.log


def _history(folder: Path) -> Path:
    numbers = np.arange(6.0).reshape(2, 3)
    labels = [[["induction"], [], ["previous", "local"]], [[], ["local"], []]]
    alike = {"cka": Alike(0.5, float("nan"), (("L0H1", 0.25), ("L0H0", 0.25)))}
    look = {"passage": {"broad": numbers, "rare": numbers * np.nan}, "repeats": {"induction": numbers}}
    looks = [HeadLook(step, 0.5, **look, labels=labels, alike=alike) for step in (3, 7)]
    HeadHistory({"settings": {"seed": 1}}, looks).write(folder / "heads.jsonl")
    return folder / "heads.jsonl"


def _read_history(path: Path) -> Any:
    found = HeadHistory.read(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, for numbers that are large
        return str(found), found.passage("broad").shape, found._repr_html_()


def _budget(folder: Path) -> Path:
    kept = (torch.rand(4).double(), torch.rand(4).double())
    save_budget(Budget(((5, None), (None, 7)), kept, 5, 2, 0.9, ((6, 6), (6, 5)), 31), folder / "budget.json")
    return folder / "budget.json"


def _read_budget(path: Path) -> Any:
    found = read_budget(path)
    return found.masks(), found.caches(), str(found)


def _tally() -> Tally:
    torch.manual_seed(3)
    trouble = Trouble("a.txt", "byte 0", 1, (0, 2), "scores")
    return Tally(torch.rand(2, 5, 2).double(), torch.zeros(2, 2).double(), 3, 17, [trouble], frozenset({"cpu"}))


def _passages() -> Collected:
    tokens, weights = tuple("武松打虎"), (None, 0.5, 0.25, None)
    one = CorpusPassage(0.5, "a.txt", "line 1", 0, 5, (4, 5, 6, 9), tokens, weights)
    return Collected(2, [[one], []], [(7, [None, one])])


def _unit(folder: Path) -> Path:
    units = Units(folder / "out.csv")
    units.folder.mkdir()
    units.write(0, Measured(1, {0: _tally(), 4: _tally()}, _passages(), [], "ab"), {"batch": 3})
    return units.folder / "unit-000000.json"


def _read_unit(path: Path) -> Any:
    found, how = Units(path.parent.with_suffix("")).read(0, 2, Collected.nothing(2, 2))
    numbers = {source: (x.numbers, x.lost, x.windows, x.troubles, x.kernels) for source, x in found.sums.items()}
    return numbers, how, found.passages, found.sha256


def _manifest(folder: Path) -> Path:
    units = Units(folder / "out.csv")
    units.folder.mkdir()
    options = Options(["entropy"], 3, 3, None, "all", "text", None, None, "float32", 8, "weight")
    units.begin(Settings(options, {"sha256": "ab"}, [Source("a.txt", "text", 100, "", "7")], 64, 4, Limit(0, 1, 0)))
    return units.folder / "manifest.json"


LINES = ["武松打虎。", "The tiger sleeps!", "", "再来？" * 9]


def _texts(folder: Path) -> Path:
    (folder / "corpus.txt").write_text("\n".join(LINES * 40), encoding="utf-8")
    return folder / "corpus.txt"


def _jsonl(folder: Path) -> Path:
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES * 9), "utf-8")
    return folder / "corpus.jsonl"


def _parquet(folder: Path) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (the parquet extra)")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": [f"{line} {i}" for i, line in enumerate(LINES * 9)], "n": list(range(36))})
    parquet.write_table(table, folder / "corpus.parquet", row_group_size=11)
    return folder / "corpus.parquet"


def _read_corpus(path: Path) -> Any:
    source = find_sources([path])[0]
    return [x.text for x in documents(source, 0, source.size, STEP, "text")]


def _conllu(folder: Path) -> Path:
    rows = [(1, "武松", 2, "nsubj"), (2, "打", 0, "root"), (3, "虎", 2, "obj")]
    lines = ["\t".join((str(i), word, *"_" * 4, str(head), name, "_", "_")) for i, word, head, name in rows]
    (folder / "tree.conllu").write_text("# text = 武松打虎\n" + "\n".join(lines) + "\n\n", encoding="utf-8")
    return folder / "tree.conllu"


KINDS = {
    "map": Kind(_map, lambda path: AttentionMap.load(path).to_dense()),
    "checkpoint": Kind(_checkpoint, lambda path: load_checkpoint(path)[0].state_dict()),
    "training state": Kind(_training, _read_training),
    "record of heads": Kind(_history, _read_history),
    "budget": Kind(_budget, _read_budget),
    "manifest": Kind(_manifest, lambda path: Units(path.parent.with_suffix("")).settings()),
    "finished unit": Kind(_unit, _read_unit),
    "text": Kind(_texts, _read_corpus),
    "JSON lines": Kind(_jsonl, _read_corpus),
    "Parquet": Kind(_parquet, _read_corpus),
    "CoNLL-U": Kind(_conllu, read_conllu),
}


def survives(path: Path, name: Path, read: Callable[[], Any], times: int, seed: int, exact: bool = False) -> int:
    """Damage a file so many times; how often it could be read all the same."""
    whole, before = path.read_bytes(), read()
    fine, told = 0, []
    for data in damaged(whole, times, seed):
        path.write_bytes(data)
        try:
            found = read()
        except HeadwiseError as error:
            told.append(str(error))
            continue
        fine += 1
        assert not exact or alike(found, before), data
    assert [one for one in told if name.name not in one or "\n" in one] == []
    path.write_bytes(whole)
    assert alike(read(), before)
    return fine


def alike(found: Any, before: Any) -> bool:
    """Whether plain values are the same, bit for bit."""
    if isinstance(found, Tensor):
        return isinstance(before, Tensor) and found.dtype == before.dtype and torch.equal(found, before)
    if isinstance(found, dict):
        return found.keys() == before.keys() and all(alike(x, before[name]) for name, x in found.items())
    if isinstance(found, list | tuple):
        return len(found) == len(before) and all(map(alike, found, before))
    return type(found) is type(before) and (found == before or hasattr(found, "__dict__"))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_told_by_name(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind].write(tmp_path)
    fine = survives(path, path, lambda: KINDS[kind].read(path), TIMES, seed=1, exact=kind in TENSORS)
    assert fine < TIMES


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_told_by_name_many_times(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind].write(tmp_path)
    survives(path, path, lambda: KINDS[kind].read(path), 50 * TIMES, seed=2, exact=kind in TENSORS)


@pytest.fixture(scope="session")
def transformers() -> Iterator[Any]:
    """transformers, imported before warnings are errors, and silent about tiny models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
        assert found.PreTrainedModel
    before = found.utils.logging.get_verbosity()
    found.utils.logging.set_verbosity_error()
    found.utils.logging.disable_progress_bar()
    yield found
    found.utils.logging.set_verbosity(before)
    found.utils.logging.enable_progress_bar()


def _pruned(transformers: Any, folder: Path) -> Path:
    torch.manual_seed(3)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 7}
    config = transformers.BertConfig(vocab_size=11, max_position_embeddings=13, pad_token_id=0, **sizes)
    model: nn.Module = transformers.BertModel(config).eval()
    save_pruned(prune(model, {"encoder.layer.0.attention.self": [1]}, copy=True).model, folder / "pruned")
    return folder / "pruned"


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # transformers', about strange configurations
@pytest.mark.parametrize("name", ["heads.json", "config.json", "model.safetensors"])
def test_a_damaged_pruned_folder_is_told_by_name(name: str, tmp_path: Path, transformers: Any) -> None:
    folder = _pruned(transformers, tmp_path)

    def read() -> Any:
        return load_pruned(folder).state_dict()

    survives(folder / name, folder, read, FEW, seed=3, exact=name != "config.json")


def _opened(transformers: Any, folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(3)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 5}
    config = transformers.LlamaConfig(vocab_size=7, max_position_embeddings=13, pad_token_id=0, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "opened")
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "武松": 1, "打": 2, "虎": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder / "opened")
    return folder / "opened"


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # transformers', about strange configurations
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_damaged_folder_of_transformers_is_told_by_name(name: str, tmp_path: Path, transformers: Any) -> None:
    from headwise.lm.loading import load_model

    folder = _opened(transformers, tmp_path)

    def read() -> Any:
        subject = load_model(folder)
        return len(subject.maps(subject.read("武松 打 虎").ids))

    survives(folder / name, folder, read, FEW, seed=4)
