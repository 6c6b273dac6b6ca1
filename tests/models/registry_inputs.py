"""What a model of any type is called with, found from the names of its forward's arguments."""

import re
from collections.abc import Iterator
from inspect import Parameter, signature
from typing import Any

import torch
from registry_models import IMAGE, PATCH, VOCAB
from registry_overrides import INPUTS
from torch import Tensor

BATCH, LENGTH, TARGET, WIDTH = 2, 11, 7, 64
LARGEST_IMAGE = 512
Inputs = dict[str, Any]


def candidates(model: Any, model_type: str) -> Iterator[tuple[str, Inputs]]:
    """Inputs to try, the richest first, each with what they are of: "text", "image and text", "audio" …"""
    names = _arguments(model)
    needed = {name: x for name, x in names.items() if x.default is Parameter.empty}
    config, main = model.config, model.main_input_name
    if model_type in INPUTS:
        yield "its own", INPUTS[model_type](config)
    if "input_ids" in names:
        text = _with_targets(model, names, {"input_ids": tokens(config, LENGTH)})
        rest = {name: x for name in needed if name not in text and (x := value(name, config)) is not None}
        if any(name in names for name in ("pixel_values", "images")):
            yield from _images_and_text(model, names, rest)
        yield "text", {**rest, **text}
        if any(name not in ("input_ids", "decoder_input_ids") for name in needed):
            yield "text", text
    senses = [name for name in needed if re.search("pixel|image|video|audio|feature|speech|input_values", name)]
    for name in dict.fromkeys((main, "pixel_values", "input_features", "input_values", "audio_values", *senses)):
        if name in names and name != "input_ids":
            packed = _GRIDS & names.keys() and not re.search("audio|feature|values", name)
            for kind, given in _grids(config, name) if packed else _senses(name, config):
                rest = {other: x for other in needed if other not in given and (x := value(other, config)) is not None}
                rest = {other: x for other, x in rest.items() if other not in given}
                yield kind, _with_targets(model, names, {**rest, **{k: v for k, v in given.items() if k in names}})
    every = {name: x for name in needed if (x := value(name, config)) is not None}
    if every:
        yield "hidden states", every
    if "inputs_embeds" in names:
        yield "embeddings", {"inputs_embeds": value("inputs_embeds", config)}
    if "hidden_states" in names:
        for kind, given in _grids(config, "hidden_states"):
            yield kind, {name: x for name, x in given.items() if name in names}
    known = {name: x for name in names if name not in _NEVER and (x := value(name, config)) is not None}
    for left_out in ("inputs_embeds", "input_ids", "pixel_values"):
        if left_out in known and len(known) > 1:
            yield "all arguments", {name: x for name, x in known.items() if name != left_out}


_GRIDS = {"grid_thw", "image_grid_thw", "grid_hws", "image_grid_hws"}
_NEVER = {"encoder_outputs", "decoder_inputs_embeds", "attention_mask", "position_ids"}


def _arguments(model: Any) -> dict[str, Parameter]:
    kinds = Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL
    return {name: x for name, x in signature(model.forward).parameters.items() if x.kind not in kinds}


def _with_targets(model: Any, names: dict[str, Parameter], given: Inputs) -> Inputs:
    if "decoder_input_ids" in names and getattr(model.config, "is_encoder_decoder", False):
        return {**given, "decoder_input_ids": tokens(model.config, TARGET, seed=2)}
    return given


def tokens(config: Any, length: int, seed: int = 0) -> Tensor:
    """Random tokens [BATCH, length] that mean nothing special."""
    size = find(config, "vocab_size") or VOCAB
    return torch.randint(min(3, size - 1), max(4, min(60, size)), (BATCH, length), generator=_random(seed)).clamp(
        max=size - 1
    )


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def find(config: Any, *names: str) -> Any:
    """The first of these fields that the configuration or a part of it has."""
    parts = [config]
    while parts:
        part = parts.pop(0)
        for name in names:
            if (found := getattr(part, name, None)) is not None:
                return found
        parts += [x for sub in getattr(part, "sub_configs", ()) if (x := getattr(part, sub, None)) is not None]
    return None


def _square(x: Any, default: int) -> tuple[int, int]:
    if isinstance(x, list | tuple):
        return (int(x[-2]), int(x[-1])) if len(x) > 1 else (int(x[0]), int(x[0]))
    if isinstance(x, dict):
        return int(x.get("height", default)), int(x.get("width", default))
    return (int(x), int(x)) if x else (default, default)


def image(config: Any, *axes: int) -> Tensor:
    """Pixels [BATCH, *axes, channels, height, width] of the size that the configuration names."""
    size = _square(find(config, "image_size", "input_size", "img_size"), 3 * IMAGE)  # a tower of convolutions has none
    if max(size) > LARGEST_IMAGE:
        raise ValueError(f"images of {size} are too large for this run")
    return torch.randn(BATCH, *axes, _channels(config), *size, generator=_random(1))


def _channels(config: Any) -> int:
    found = find(config, "num_channels", "in_channels", "in_chans")
    return found if isinstance(found, int) else 3


def _patch(config: Any) -> int:
    return _square(find(config, "patch_size", "spatial_patch_size"), PATCH)[0]


def _grids(config: Any, name: str) -> Iterator[tuple[str, Inputs]]:
    """Patches one after the other, [patches, channels · patch²], and how they lie."""
    side, patch = 4, _patch(config)
    frames = find(config, "temporal_patch_size") or 1
    width = _channels(config) * int(frames) * patch * patch
    patches = torch.randn(BATCH * side * side, width, generator=_random(1))
    grid = torch.tensor([[1, side, side]] * BATCH)
    apart = patches.view(BATCH * side * side, -1, patch, patch)
    for pixels in (patches, apart):
        yield "image", {name: pixels, "grid_thw": grid, "image_grid_thw": grid, "grid_hws": grid[:, 1:],
                        "image_grid_hws": grid[:, 1:],
                        "merge_sizes": torch.ones(BATCH, dtype=torch.long)}  # fmt: skip
    rows = patches.view(BATCH, side * side, -1)
    shapes = {"spatial_shapes": grid[:, 1:], "pixel_attention_mask": torch.ones(BATCH, side * side, dtype=torch.long),
              "attention_mask": torch.ones(BATCH, side * side, dtype=torch.long),
              "image_position_ids": _places(side), "pixel_position_ids": _places(side)}  # fmt: skip
    yield "image", {name: rows, **shapes}
    yield "image", {name: rows[..., : 3 * patch * patch], **shapes}


def _places(side: int) -> Tensor:
    at = torch.arange(side)
    return torch.cartesian_prod(at, at).expand(BATCH, -1, -1)


def _images(config: Any, name: str) -> Iterator[tuple[str, Inputs]]:
    frames = find(config, "num_frames", "frames_per_clip") or 2
    size = image(config).shape[-2:]
    more = {"image_sizes": torch.tensor([list(size)] * BATCH), "target_sizes": torch.tensor([list(size)] * BATCH),
            "pixel_mask": torch.ones(BATCH, *size, dtype=torch.long)}  # fmt: skip
    for extras in ({}, more):
        yield "image", {name: image(config), **extras}
        yield "image", {name: image(config, 1), **extras}
        yield "video", {name: image(config, int(frames)), **extras}


def _senses(name: str, config: Any) -> Iterator[tuple[str, Inputs]]:
    """Images, videos or sounds of several shapes under that name."""
    if "pixel" in name or "image" in name or "video" in name:
        yield from _images(config, name)
        yield from _grids(config, name)
        return
    found = find(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_feat_size",
                 "feature_size", "input_dim", "spectrogram_bins", "mel_bins", "num_features", "input_size")  # fmt: skip
    long = 2 * (find(config, "max_source_positions") or 24)
    length = find(config, "max_length") or 32
    shapes: list[tuple[int, ...]] = []
    for bins in dict.fromkeys(x for x in (found, 128, 80, 160) if isinstance(x, int)):
        shapes += [(bins, long), (length, bins), (long, bins), (64, bins), (1, 32, bins)]
    for shape in (*shapes, (1600,), (1, 1600), (4800,), (1, 4800), (24000,), (1, 24000), (LENGTH, WIDTH)):
        sound = torch.randn(BATCH, *shape, generator=_random(1))
        yield "audio", {name: sound}
        yield "audio", {name: sound, "feature_attention_mask": torch.ones(BATCH, shape[-1]),
                        "feature_lens": torch.tensor([shape[-1]] * BATCH),
                        "attention_mask": torch.ones(BATCH, shape[0], dtype=torch.bool),
                        "input_features_mask": torch.ones(BATCH, shape[0], dtype=torch.bool)}  # fmt: skip
    yield "text", {name: tokens(config, LENGTH)}
    yield "hidden states", {name: value("hidden_states", config)}


def value(name: str, config: Any) -> Any:
    """Something for an argument that a forward cannot do without; None if its name says nothing."""
    width = find(config, "hidden_size", "d_model", "embed_dim", "n_embd", "dim") or WIDTH
    width = width if isinstance(width, int) else WIDTH
    if name in ("input_ids", "decoder_input_ids", "text_ids", "semantic_input_ids"):
        return tokens(config, LENGTH)
    if "grid_thw" in name:
        return torch.tensor([[1, 4, 4]] * BATCH)
    if name in ("attention_mask", "text_attention_mask", "token_type_ids"):
        return torch.ones(BATCH, LENGTH, dtype=torch.long)
    if name == "position_ids":
        return torch.arange(LENGTH).expand(BATCH, -1)
    if name == "bbox":
        return torch.randint(0, 30, (BATCH, LENGTH, 4), generator=_random(4)).sort(-1).values
    if name in ("hidden_states", "inputs_embeds", "x", "hidden_state", "query_embeds", "context", "features", "embeds",
                "input_embeds", "patch_embeds", "decoder_inputs_embeds", "backbone_last_hidden_state"):  # fmt: skip
        return torch.randn(BATCH, LENGTH, width, generator=_random(1))
    if name in ("encoder_hidden_states", "encoder_outputs", "image_hidden_states", "vision_features",
                "key_value_states", "text_features", "image_embeds"):  # fmt: skip
        other = find(config, "encoder_hidden_size", "cross_attention_hidden_size") or width
        return torch.randn(BATCH, 13, other, generator=_random(3))
    if name in ("encoder_attention_mask",):
        return torch.ones(BATCH, 13, dtype=torch.long)
    if "pixel_values" in name or name in ("images", "template_image", "prompt_pixel_values"):
        return image(config)
    if name in ("past_values", "past_observed_mask"):
        shape = _history(config)
        return torch.randn(shape, generator=_random(1)) if name == "past_values" else torch.ones(shape)
    if name == "past_time_features":
        return torch.randn(*_history(config)[:2], find(config, "num_time_features") or 0, generator=_random(1))
    return None


def _history(config: Any) -> tuple[int, ...]:
    length = find(config, "context_length") or 32
    lags = find(config, "lags_sequence")
    shape = (BATCH, length + max(lags)) if lags else (BATCH, length)
    channels = find(config, "num_input_channels", "input_size") or 1
    return shape if lags and channels == 1 else (*shape, channels)


def _images_and_text(model: Any, names: dict[str, Parameter], rest: Inputs) -> Iterator[tuple[str, Inputs]]:
    """An image's features in the place of image tokens; else images and texts side by side."""
    config = model.config
    token = find(config, "image_token_id", "image_token_index", "media_token_id")
    inner = getattr(model, "model", None)
    features = getattr(model, "get_image_features", None) or getattr(inner, "get_image_features", None)
    senses = [*_images(config, "pixel_values"), *_grids(config, "pixel_values")]
    if token is not None and features is not None:
        taken = set(signature(features).parameters)
        for _, given in senses:
            given = {name: x for name, x in given.items() if name in taken or name in names}
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    count = _count(features(**{name: x for name, x in given.items() if name in taken}))
            except Exception:
                continue
            ids = torch.cat([tokens(config, 4), torch.full((BATCH, count // BATCH), token), tokens(config, 5, 1)], 1)
            given = {name: x for name, x in given.items() if name in names}
            types = {name: (ids == token).long() for name in ("token_type_ids", "mm_token_type_ids") if name in names}
            yield "image and text", _with_targets(model, names, {**rest, **given, "input_ids": ids, **types})
            yield "image and text", _with_targets(model, names, {**rest, **given, "input_ids": ids})
    if token is None:
        for _, given in senses:
            given = {name: x for name, x in given.items() if name in names}
            ids = {"input_ids": tokens(config, LENGTH)}
            yield "image and text", _with_targets(model, names, {**rest, **given, **ids})


def _count(features: Any) -> int:
    """How many tokens an image's features take, all images together."""
    if hasattr(features, "pooler_output") and features.pooler_output is not None:
        features = features.pooler_output
    elif hasattr(features, "last_hidden_state"):
        features = features.last_hidden_state
    if isinstance(features, list | tuple):
        return sum(_count(x) for x in features if isinstance(x, Tensor | list | tuple))
    return int(features.shape[:-1].numel())
