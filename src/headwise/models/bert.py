"""BERT and what is built like it in transformers: RoBERTa, ELECTRA, XLM-R, CamemBERT …"""

from torch import nn

from headwise.models.site import HeadSite, Kind, Part, features, linear_parts


class BertKind(Kind):
    """A module with a child that has query, key and value maps, and an `output.dense` beside it. The place is the
    child, `….attention.self`."""

    name = "bert"
    about = "BERT-like models of transformers (query, key, value, output.dense)"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`; module is the one that holds both."""
        inner, dense = getattr(module, "self", None), getattr(getattr(module, "output", None), "dense", None)
        if not isinstance(inner, nn.Module) or not isinstance(dense, nn.Module):
            return None
        d = getattr(inner, "attention_head_size", None)
        maps = [getattr(inner, x, None) for x in ("query", "key", "value")]
        if not isinstance(d, int):
            return None
        width = features(dense, 1)
        if width is None or any(features(linear, 0) != width for linear in maps):
            return None
        h = width // d
        return HeadSite(f"{name}.self".lstrip("."), inner, self.name, h, h, d, d, dense, self)

    def parts(self, module: nn.Module, output: nn.Module | None) -> list[Part]:
        """As in `Kind`."""
        assert output is not None
        d = module.attention_head_size
        assert isinstance(d, int)
        maps = {"q": module.query, "k": module.key, "v": module.value}
        parts = [part for x, linear in maps.items() for part in linear_parts(x, linear, 0, "query", d)]  # type: ignore[arg-type]
        return [*parts, *linear_parts("o", output, 1, "query", d)]
