"""A misspelt name is answered in one form everywhere: the argument, the value, the closest names, and all of them."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.costs.configs import find
from headwise.costs.work import Counts, Work, cache_bytes
from headwise.errors import ConfigError, check_choice, unknown_name, unknown_option
from headwise.lm import DecoderConfig
from headwise.nn.registry import build, counts_of
from headwise.stats import of_tokens

LAYER = {"q": torch.ones(2, 3, 5), "k": torch.ones(2, 3, 5), "v": torch.ones(2, 3, 5), "o": torch.ones(2, 5, 3)}


def attended() -> None:
    q = torch.zeros(1, 2, 3, 5)
    hw.attend(q, q, q, return_map=True, measures=["entropi"])


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "measure": (attended, "measure='entropi': did you mean 'entropy'"),
    "measure of tokens": (lambda: of_tokens("class_mas", None), "measure='class_mas': did you mean 'class_mass'"),
    "design": (lambda: build("latnt", 6, 2), "design='latnt': did you mean 'latent'"),
    "option": (lambda: build("multi_head", 6, 2, {"rotery": True}), "rotery=True: did you mean rotary? multi_head"),
    "option of a class": (lambda: hw.nn.GatedAttention.build(6, 2, gat="head"), "gat='head': did you mean gate? Gated"),
    "size": (lambda: counts_of("gqa", {"num_kv_head": 2}), "num_kv_head=2: did you mean num_kv_heads or num_heads? "),
    "value of an option": (lambda: hw.nn.GatedAttention(6, 2, gate="heads"), "gate='heads': did you mean 'head'"),
    "config": (lambda: find("llama3-8b"), "config='llama3-8b': did you mean 'llama-3-8b'"),
    "dtype": (lambda: Work(1, 3, 3, dtype="float23"), "dtype='float23': did you mean 'float32'"),
    "dtype of a cache": (
        lambda: cache_bytes(Counts.__new__(Counts), 3, dtype="bfloat61"), "dtype='bfloat61': did you mean 'bfloat16'",
    ),
    "order": (lambda: DecoderConfig(7, order="prae"), "order='prae': did you mean 'pre'? expected 'pre' or 'post'"),
    "circuit": (lambda: hw.analysis.circuit_similarity([LAYER], "ovv"), "circuit='ovv': did you mean 'ov'"),
    "part of a word": (lambda: hw.analysis.composition([LAYER, LAYER], "qk"), "kind='qk': did you mean 'q'"),
    "maps": (lambda: hw.watch(nn.MultiheadAttention(6, 2), maps="lasy"), "maps='lasy': did you mean 'lazy'"),
    "ablation": (
        lambda: hw.analysis.ablation_importance(nn.MultiheadAttention(6, 2), [0], len, by="maen"),
        "by='maen': did you mean 'mean'",
    ),
    "merging": (lambda: hw.edit.merge_kv(nn.MultiheadAttention(6, 2), 1, "men"), "method='men': did you mean 'mean'"),
    "kernel": (lambda: hw.kernels.register(Like(), before="cpuu"), "before='cpuu': did you mean 'cpu'"),
}  # fmt: skip


class Like(type(hw.kernels.KERNELS["torch_blocks"])):  # type: ignore[misc]
    """A kernel whose name is not taken."""

    name = "like_torch_blocks"


@pytest.mark.parametrize("case", WRONG)
def test_the_closest_name_is_in_the_message(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(ConfigError, match=re.escape(words)):
        call()


def test_names_are_listed_or_said_where() -> None:
    assert str(unknown_name("side", "qqq", "ab")) == "side='qqq': expected 'a' or 'b'"
    assert str(unknown_name("--by", "oen", ["one", "two", "four"])) == (
        "--by 'oen': did you mean 'one'? expected one of 'one', 'two', 'four'"
    )
    assert str(unknown_name("x", "zzz", ["one"], listed="`list` lists all")) == "x='zzz': unknown; `list` lists all"
    assert str(unknown_option("siz", 2, "a box", ["size"])) == "siz=2: did you mean size? a box supports size"


def test_a_value_is_compared_whole_and_need_not_be_a_name() -> None:
    check_choice("side", "q", "qkv")
    for value in ("qk", ["q"], None, 3):
        with pytest.raises(ConfigError, match=r"side=.*: .*expected one of 'q', 'k', 'v'"):
            check_choice("side", value, "qkv")
