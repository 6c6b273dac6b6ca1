"""Attention modules of transformers whose structure is known, but whose code works with one number of heads only."""

from torch import nn

_OF_MODEL = "its code takes the width of its input for that of all heads together"
_OF_CONFIG = "its code reads the number of heads from the configuration, which is one for all layers"
_MADE_AGAIN = "its model makes it again from the configuration, for texts of another length"
_TOGETHER = "all its heads attend with the delays at which their mean autocorrelation is largest"

# By the family, a folder in transformers.models, and the class: several families have an `Attention`.
_WHY = {
    ("autoformer", "AutoformerAttention"): _TOGETHER,
    ("big_bird", "BigBirdBlockSparseAttention"): _MADE_AGAIN,
    ("big_bird", "BigBirdSelfAttention"): _MADE_AGAIN,
    ("dab_detr", "DetrAttention"): _OF_MODEL,
    ("fsmt", "Attention"): _OF_MODEL,
    ("granite_speech5", "GraniteSpeech5EncoderAttention"): _OF_CONFIG,
    ("groupvit", "GroupViTAttention"): _OF_MODEL,
    ("led", "LEDDecoderAttention"): _OF_MODEL,
    ("mask2former", "Mask2FormerAttention"): _OF_MODEL,
    ("moonshine", "MoonshineAttention"): _OF_CONFIG,
    ("moonshine_streaming", "MoonshineStreamingAttention"): _OF_CONFIG,
    ("oneformer", "OneFormerAttention"): _OF_MODEL,
    ("pegasus_x", "PegasusXGlobalLocalAttention"): _OF_MODEL,
    ("table_transformer", "TableTransformerAttention"): _OF_MODEL,
    ("trocr", "TrOCRAttention"): _OF_MODEL,
}


def fixed_code(module: nn.Module) -> str:
    """Why the number of heads of a module cannot change, in one sentence; "" if nothing is known against it."""
    for kind in type(module).__mro__:
        family = kind.__module__.split(".")[-2:-1]
        if family and (why := _WHY.get((family[0], kind.__name__))):
            return (
                f"{type(module).__name__} keeps its number of heads, as {why}. Mask heads instead: "
                f"headwise.models.scale_heads(find_heads(model), gates), with 0 for a head"
            )
    return ""
