"""What publications state of released models: how many heads, of which size, and which keys they share."""

from itertools import pairwise

from headwise.costs import CONFIGS
from headwise.wording import tr
from headwise_textbook.claims.claim import Check, at_least, at_most, claim, equal
from headwise_textbook.claims.model import layer, rank
from headwise_textbook.texts import read_toml

# d_model, heads and size of a head, by the name of the model.
PUBLISHED: dict[str, tuple[int, int, int]]
PUBLISHED, IN_THE_CHAPTER = read_toml("headwise_textbook", "sizes.toml").values()


@claim
def head_size_table() -> list[Check]:
    usual = [size in (64, 128) for _, _, size in PUBLISHED.values()]
    unequal = sum(h * size != d for d, h, size in PUBLISHED.values())
    otherwise = sum(d // h != size for d, h, size in PUBLISHED.values())
    wrong = sum(h * size != d for d, h, size in IN_THE_CHAPTER.values())
    return [
        equal(tr("rows of the chapter's table with h·d_k ≠ d_model"), wrong, 0),
        at_least(tr("share of {count} published head sizes that are 64 or 128", count=len(usual)),
                 sum(usual) / len(usual), 0.5),
        equal(tr("published models with h·d_k ≠ d_model"), unequal, 0).beyond(),
        at_least(tr("models whose published size is not ⌊d_model / h⌋"), otherwise, 1).control(),
    ]  # fmt: skip


@claim
def llama_2_uses_gqa() -> list[Check]:
    shared = {name: _sharing(name) for name in ("llama-2-70b", "llama-2-13b", "llama-2-7b", "llama-65b")}
    what = {size: tr("query heads for each KV head, {size}", size=size) for size in shared}
    return [
        at_least(what["llama-2-70b"], shared["llama-2-70b"], 2),
        at_least(what["llama-2-13b"], shared["llama-2-13b"], 2).beyond(),
        at_least(what["llama-2-7b"], shared["llama-2-7b"], 2).beyond(),
        equal(what["llama-65b"], shared["llama-65b"], 1).control(),
    ]


@claim
def eight_heads_are_usual() -> list[Check]:
    eight = [h == 8 for _, h, _ in PUBLISHED.values()]
    narrow = [h for d, h, _ in PUBLISHED.values() if d == 512]
    usual = sum(size in (64, 128) for _, _, size in PUBLISHED.values()) / len(PUBLISHED)
    return [
        equal(tr("heads of the first Transformer, base"), PUBLISHED["Transformer base (1706.03762, table 3)"][1], 8),
        at_least(tr("share of those with d_model = 512 that have 8 heads"), narrow.count(8) / len(narrow), 0.5),
        at_least(tr("share of {count} published models with 8 heads", count=len(eight)), sum(eight) / len(eight), 0.5)
        .beyond(),
        at_least(tr("share with heads of size 64 or 128"), usual, 0.5).control(sum(eight) / len(eight)),
    ]  # fmt: skip


@claim
def usual_numbers_of_heads() -> list[Check]:
    narrow, wide = ([h for d, h, _ in PUBLISHED.values() if (d < 2048) is small] for small in (True, False))
    usual, wider = (sum(h in (8, 12, 16) for h in part) / len(part) for part in (narrow, wide))
    return [
        at_least(tr("share with 8, 12 or 16 heads, d_model below 2048"), usual, 0.5),
        at_least(tr("share with 8, 12 or 16 heads, d_model from 2048"), wider, 0.5).beyond(),
        at_most(tr("share with 10, 14 or 20 heads, d_model below 2048"),
                sum(h in (10, 14, 20) for h in narrow) / len(narrow), 0.1).control(),
    ]  # fmt: skip


@claim
def heads_raise_width() -> list[Check]:
    gpt_2, gpt_3 = (_sorted(sizes, name) for sizes, name in ((IN_THE_CHAPTER, "GPT-2"), (PUBLISHED, "GPT-3")))
    t5 = _sorted(PUBLISHED, "T5-")[1:]  # 3B and 11B
    wider = [b[0] > a[0] for a, b in pairwise(t5)]
    same_heads = [sum(a[1] == b[1] for a, b in pairwise(part)) for part in (gpt_2, gpt_3)]
    return [
        equal(tr("steps of GPT-2 in the table that widen d_model with as many heads"), same_heads[0], 0),
        equal(tr("the same steps of GPT-3, eight sizes"), same_heads[1], 0).beyond(),
        equal(tr("steps from T5-3B to T5-11B, with four times as many heads, that widen d_model"), sum(wider), 0)
        .control(len(gpt_2) - 1),
    ]  # fmt: skip


@claim
def bert_is_similar() -> list[Check]:
    bert = [CONFIGS[name] for name in ("bert-base", "bert-large")]
    sizes = [one.d_model / (one.size("num_heads") or 1) for one in bert]
    large = PUBLISHED["GPT-3 175B (2005.14165, table 2.1)"][2]
    return [
        *(equal(tr("size of the heads of {name}", name=one.name), size, 64)
          for one, size in zip(bert, sizes, strict=True)),
        equal(tr("size of the heads of GPT-3"), large, 128).control(),
    ]  # fmt: skip


@claim
def gqa_keeps_most() -> list[Check]:
    h, shared = 64, 8  # query heads for each KV head of LLaMA-2 70B
    kept = {g: (1 - 1 / g) / (1 - 1 / h) for g in (1, 2, shared)}
    keys = {heads: rank(layer("multi_head", 48, 8, num_kv_heads=heads).k_proj.weight) for heads in (1, 2, 8)}
    return [
        at_least(tr("share of MQA's saving that GQA keeps, 8 query heads a group"), kept[shared], 0.8),
        at_least(tr("directions of its keys relative to MQA, two KV heads"), keys[2] / keys[1], 2.0),
        at_most(tr("share of the saving that groups of one keep"), kept[1], 0.0).control(),
    ]


def _sorted(sizes: dict[str, tuple[int, int, int]], name: str) -> list[tuple[int, int, int]]:
    """The sizes of the models whose names begin so, by width and heads."""
    return sorted(size for model, size in sizes.items() if model.startswith(name))


def _sharing(name: str) -> float:
    """Query heads for each KV head of a published model."""
    heads = CONFIGS[name].size("num_heads") or 1
    return heads / (CONFIGS[name].size("num_kv_heads") or heads)
