"""Designs by name, with options from a file or a command line."""

from typing import Any

import pytest

from headwise.errors import ConfigError, ShapeError
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.registry import DESIGNS, build, design_of, names, options_of, read_options


@pytest.mark.parametrize("name", DESIGNS)
def test_a_name_gives_its_design(name: str) -> None:
    assert type(build(name, 12, 6)) is DESIGNS[name] is design_of(name)


@pytest.mark.parametrize("name", names())
def test_options_are_those_that_the_constructor_takes(name: str) -> None:
    """Every option is taken with its default, and an invented one by none."""
    options = options_of(name)
    needed = {"num_kv_heads": 6} if name == "gqa" else {}
    build(name, 12, 6, options | needed)
    assert "dropout" in options
    with pytest.raises(ConfigError, match=f"wings=2: .*{name} supports .*dropout"):
        build(name, 12, 6, {"wings": 2} | needed)


def test_grouped_names_stand_for_their_heads() -> None:
    one, two = build("mqa", 12, 6), build("gqa", 12, 6, {"num_kv_heads": 2, "bias": True})
    assert type(one) is type(two) is MultiHeadAttention
    assert (one.num_kv_heads, two.num_kv_heads) == (1, 2)
    assert build("mqa", 12, 6, {"num_kv_heads": 1}).num_kv_heads == 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("multihead", {}, "design='multihead': did you mean 'multi_head'"),
        ("zzz", {}, "design='zzz': expected one of 'multi_head', 'mqa', 'gqa', 'per_head'"),
        ("gqa", {}, "num_kv_heads: gqa requires it"),
        ("mqa", {"num_kv_heads": 2}, "num_kv_heads=2: mqa has 1"),
        ("latent", {"num_kv_heads": 2}, "num_kv_heads=2: .*latent supports"),
        ("sparse_mixture", {"top_k": "two"}, "top_k='two': expected a whole number"),
        ("sparse_mixture", {"top_k": True}, "top_k=True: expected a whole number"),
        ("sparse_mixture", {"top_k": 1.5}, "top_k=1.5: expected a whole number"),
        ("sparse_mixture", {"per": 3}, "per=3: expected a word"),
        ("multi_head", {"bias": 1}, "bias=1: expected true or false"),
        ("convolution", {"sharpness": "much"}, "sharpness='much': expected a number"),
        ("latent", {"latentdim": 4}, "latentdim=4: did you mean latent_dim?"),
        ("sparse_mixture", {"top_k": 7}, "top_k=7: expected 1 <= top_k <= 6"),
        ("sparse_mixture", {"top_k": 0}, "top_k=0"),
    ],
)
def test_what_cannot_be_is_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(name, 12, 6, options)


def test_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ShapeError, match="num_heads=6 is not divisible by num_kv_heads=4"):
        build("gqa", 12, 6, {"num_kv_heads": 4})


def test_options_are_read_from_words() -> None:
    read = read_options(["top-k=2", " per = token ", "bias=TRUE", "sharpness=2.5", "rope_dim=0", "hidden=none"])
    assert read == {"top_k": 2, "per": "token", "bias": True, "sharpness": 2.5, "rope_dim": 0, "hidden": None}
    for bad in ("top_k", "=2", "top_k=", ""):
        with pytest.raises(ConfigError, match="expected NAME=VALUE"):
            read_options([bad])
