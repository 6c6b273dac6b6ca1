"""The test suites of libraries that need attn_implementation="eager", run with headwise's attention instead.

    git clone https://github.com/NVIDIA/kvpress && python -m venv env && env/bin/pip install ./kvpress pytest headwise
    python scripts/other_suites.py kvpress --python env/bin/python

    git clone -b v1.3.0 https://github.com/ndif-team/nnterp && python -m venv env
    env/bin/pip install nnsight==0.7.0 transformers==5.2.0 pandas plotly pytest headwise
    python scripts/other_suites.py nnterp --python env/bin/python

Runs the suite twice in its own environment, with the models' own attention and with `hw.attach(model)` on every model
(`weights=True` where the suite loads one with attn_implementation="eager"), and prints how many tests pass. Models of
the hub are replaced by small random ones of the same family, so nothing is downloaded; tests that need anything else
from the network, or a GPU, fail or are skipped in both runs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The plugin reads these: the attention to use, and the folder with a model of each family.
MODE, MODELS = "HEADWISE_SUITE", "HEADWISE_SUITE_MODELS"
# Part of a model's name on the hub → the family of the model that replaces it; the first one that fits, else Llama.
FAMILIES = {
    "llama4": "Llama4Text", "llama": "Llama", "qwen15moe": "Qwen2Moe", "qwen3moe": "Qwen3Moe", "qwen3": "Qwen3",
    "qwen": "Qwen2", "gpt2": "GPT2", "gemma3": "Gemma3Text", "gemma": "Gemma", "mixtral": "Mixtral",
    "mistral": "Mistral", "phi35moe": "Phimoe", "phi3": "Phi3", "opt": "OPT", "bigscience": "Bloom",
}  # fmt: skip


def family_of(name: str) -> str:
    """The family of a model of the hub, by its name; Llama for others."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((family for part, family in FAMILIES.items() if part in plain), "Llama")


def make_models(folder: Path) -> None:
    """A random model of each family with a tokenizer of bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<s>", "</s>", "<pad>", *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )  # fmt: skip
    tokens = {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    sizes = tokens | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
    }  # fmt: skip
    experts = {"moe_intermediate_size": 24, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    own = {
        "GPT2": {"vocab_size": 4096, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 4096},
        "Bloom": {"vocab_size": 4096, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "OPT": sizes | {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "Llama4Text": sizes | experts | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
    }  # fmt: skip
    for family in {*FAMILIES.values()}:
        config = getattr(transformers, f"{family}Config")(**tokens | own.get(family, sizes | experts))
        torch.manual_seed(0)
        kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family.removesuffix('Text')}ForCausalLM")
        getattr(transformers, kind)(config).save_pretrained(folder / family)
        fast.save_pretrained(folder / family)


def pytest_load_initial_conftests() -> None:
    """As a plugin of the suite: `from_pretrained` loads the small models, and headwise computes their attention."""
    import huggingface_hub
    import transformers

    import headwise as hw
    from headwise.models.adapters.huggingface import install

    install()  # before the suite's library, which may wrap all known attention functions
    folder, attached = Path(os.environ[MODELS]), []
    kinds = (
        transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoModelForCausalLM,
        transformers.AutoModel, transformers.PreTrainedModel, transformers.PreTrainedTokenizerFast,
    )  # fmt: skip

    def here(name: Any) -> Any:
        return str(folder / family_of(name)) if isinstance(name, str) and not Path(name).exists() else name

    for kind in kinds:
        load = kind.from_pretrained.__func__

        def local(cls: Any, name: Any, *args: Any, load: Any = load, **options: Any) -> Any:
            loaded = load(cls, here(name), *args, **options)
            ours = os.environ[MODE] == "headwise" and isinstance(loaded, transformers.PreTrainedModel)
            if ours and not any(handle.model is loaded for handle in attached):
                eager = loaded.config._attn_implementation == "eager"  # for hooks that read the weights
                try:
                    attached.append(hw.attach(loaded, weights=eager))
                except hw.ConfigError as error:  # it computes its attention by itself
                    print(f"NOT ATTACHED {type(loaded).__name__}: {error}")
            return loaded

        kind.from_pretrained = classmethod(local)
    read = transformers.PretrainedConfig.get_config_dict.__func__
    transformers.PretrainedConfig.get_config_dict = classmethod(
        lambda cls, name, **options: read(cls, here(name), **options)
    )
    huggingface_hub.get_collection = lambda *args, **options: SimpleNamespace(items=[])


def run(suite: Path, python: str, mode: str, models: Path, more: list[str]) -> tuple[dict[str, str], str]:
    """Each test's outcome: passed, failed, error or skipped; and how many there are of each, as pytest says it."""
    here = str(Path(__file__).parent)
    environment = os.environ | {
        MODE: mode, MODELS: str(models), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])),
    }  # fmt: skip
    command = [python, "-m", "pytest", "-p", "other_suites", "-q", "-rA", "--tb=line", "-p", "no:cacheprovider", *more]
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (?:\[\d+\] )?(\S+)", done.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(f"the suite did not run:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    (models.parent / f"{mode}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    counts = re.findall(r"^\d+ (?:passed|failed|error).*", done.stdout, re.MULTILINE)[-1]
    return {name: outcome.lower() for outcome, name in found}, counts.rpartition(" in ")[0]


def main() -> int:
    """Print the outcomes of both runs; 1 if a test that passes with the model's own attention fails with headwise."""
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("suite", type=Path, help="the folder in which pytest runs")
    about.add_argument("--python", default=sys.executable, help="the interpreter of the suite's environment")
    about.add_argument("--logs", type=Path, help="where pytest's output goes; a temporary folder by default")
    given, more = about.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.logs or Path(temporary)).absolute() / "models"
        folder.mkdir(parents=True, exist_ok=True)
        code = "import sys, pathlib, other_suites; other_suites.make_models(pathlib.Path(sys.argv[1]))"
        path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
        subprocess.run([given.python, "-c", code, str(folder)], check=True, env=os.environ | path)
        own, ours = {}, {}
        for title, mode, outcomes in (("own attention", "own", own), ("headwise", "headwise", ours)):
            found, counts = run(given.suite, given.python, mode, folder, more)
            outcomes.update(found)
            print(f"{title}: {counts}")
        log = (folder.parent / "headwise.log").read_text(encoding="utf-8")
    for kind in sorted(set(re.findall(r"^NOT ATTACHED (\w+)", log, re.MULTILINE))):
        print(f"not attached, since it computes its attention by itself: {kind}")
    worse = sorted(name for name, outcome in own.items() if outcome == "passed" and ours.get(name) != "passed")
    for name in worse:
        print(f"passes with its own attention only: {name}")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
