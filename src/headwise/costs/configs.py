"""Published Transformers as data: the sizes that determine the cost of a model, with their sources.

>>> find("Llama-2-70B").size("num_kv_heads")
8

`published` is the number of parameters stated by the source, or that of its released weights, norms and biases
included. `headwise.costs.model` computes it from the sizes, and tests compare the two. If a source only gives a rounded
number (Vaswani et al. 2017, Brown et al. 2020), `rounded` is the largest rounding error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headwise.errors import unknown_name
from headwise.wording import tr

STATE_BYTES = 4  # float32, whatever the dtype of the model is


@dataclass(frozen=True)
class Recurrence:
    """A layer with a state of constant size instead of a cache. Work is in multiply-adds, without decays and gates: the
    outer product that each token adds to the state, and its product with a vector (two for the delta rule)."""

    parameters: int
    width: int  # d_model
    per_token: int  # work of projections and convolution
    inside: int  # numbers per token that one step passes to the next
    update: int  # work per token to update the state and to read it
    state: int  # numbers in the state of a text, which are float32
    recent: int  # numbers of the last tokens that the convolution reads in the next step

    def state_bytes(self, size: int) -> int:
        """Bytes that are kept between decoding steps of a text; size: of a number of the model."""
        return self.state * STATE_BYTES + self.recent * size


def mamba_1(
    d_model: int, *, inner: int, rank: int, state: int, kernel: int, bias: bool = False, conv_bias: bool = True,
    norms: bool = False,
) -> Recurrence:  # fmt: skip
    """A selective state-space model (Gu, Dao 2023, 2312.00752); norms: of what chooses, as in Jamba."""
    linear = d_model * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * d_model
    convolved = inner * kernel
    extra = inner * (state + 2)  # A, D, and the bias of time steps
    extra += bias * (2 * inner + d_model) + conv_bias * inner + norms * (rank + 2 * state)
    return Recurrence(
        linear + convolved + extra, d_model, linear + convolved, inside=4 * inner + rank + 2 * state,
        update=2 * inner * state, state=inner * state, recent=inner * kernel,
    )  # fmt: skip


def mamba_2(
    d_model: int, *, heads: int, head_dim: int, groups: int, state: int, kernel: int, bias: bool = False,
    out_bias: bool = False, conv_bias: bool = True, norm: bool = True,
) -> Recurrence:  # fmt: skip
    """A state-space model with heads (Dao, Gu 2024, 2405.21060); norm: of its output."""
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    projected = inner + channels + heads
    linear, convolved = d_model * projected + inner * d_model, channels * kernel
    extra = 3 * heads + norm * inner + conv_bias * channels + bias * projected + out_bias * d_model
    return Recurrence(
        linear + convolved + extra, d_model, linear + convolved, inside=projected + channels + inner,
        update=2 * inner * state, state=inner * state, recent=channels * kernel,
    )  # fmt: skip


def gated_delta(d_model: int, *, heads: int, key_heads: int, key_dim: int, value_dim: int, kernel: int) -> Recurrence:
    """Linear attention by the gated delta rule (Yang et al. 2024, 2412.06464), as in Qwen3-Next."""
    keys, values = key_heads * key_dim, heads * value_dim
    channels, projected = 2 * keys + values, 2 * keys + 2 * values + 2 * heads
    linear, convolved = d_model * projected + values * d_model, channels * kernel
    state = heads * key_dim * value_dim
    return Recurrence(
        linear + convolved + 2 * heads + value_dim, d_model, linear + convolved, inside=projected + channels + values,
        update=3 * state, state=state, recent=channels * kernel,
    )  # fmt: skip


def short_convolution(d_model: int, *, kernel: int, bias: bool = False) -> Recurrence:
    """A gated convolution over the last tokens, as in LFM2."""
    linear, convolved = 4 * d_model * d_model, d_model * kernel
    return Recurrence(
        linear + convolved + bias * 5 * d_model, d_model, linear + convolved, inside=5 * d_model, update=0, state=0,
        recent=d_model * kernel,
    )  # fmt: skip


Sizes = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class Convolution:
    """A convolution over time with bias, before the first layer: `inputs` to `outputs` channels, `width` frames."""

    inputs: int
    outputs: int
    width: int
    positions: int = 1  # in its result, per position of the encoder
    stride: int = 1  # positions in its input, per position in its result

    @property
    def weights(self) -> int:
        """Numbers in the kernel, without the bias."""
        return self.inputs * self.outputs * self.width


@dataclass(frozen=True)
class Others:
    """What all tokens pass beside attention, feed-forward networks and norms."""

    parameters: int  # all of them
    work: int  # multiply-adds per token
    inside: int  # numbers per token that one step passes to the next
    table: int = 0  # of those, the ones of which a token reads `row`
    row: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of one Transformer.

    name: of the model. vocab: rows of the token embedding. pooler: whether a dense layer reads the first token.
    design, sizes: the design of the attention and its sizes besides d_model, as in `headwise.nn.registry`.
    layer_sizes: the sizes of each attention layer instead, if they differ: in `layers`, then of self and cross
        attention of each decoder layer; empty if all have `sizes`.
    layers: number of blocks of attention and feed-forward; attended: the numbers of those that have attention, empty
        if all have. recurrent: the layers with a state, in place of attention or beside it. decoder_layers: number of
        blocks of a decoder with cross attention (`layers` is then the encoder), 0 for none. decoder_d_ff: width of its
        feed-forward; d_ff if 0.
    causal: whether `layers` attend causally; prefix: except over all tokens, which are then a prefix that attends to
        both sides, and what is generated after it attends causally. window: keys at a distance below it are attended
        to, which is their number per query, its own included, if causal; None for all. layer_windows: that of each of
        their attentions instead, if they differ. chunked: windows are chunks of the text, as in `Work`.
    gated: feed-forward of three matrices (act(x W_1) ∘ x W_3) W_2, Shazeer 2020, 2002.05202; else two. ff_bias: on all.
    norm: "layer" (scale and shift), "rms" (scale, of either kind of norm) or "none" (no parameters). norms: number of
        norms per block; one for each sub-layer if None. final_norms, embedding_norms: after the last and before the
        first block, those of both stacks counted.
    output: the vocabulary projection is "tied" to the embedding, its "own" matrix, or "none"; output_bias: on it.
    positions, segments: rows of learned position and segment embeddings. relative: numbers in tables of relative
        positions. convolutions: before the first layer.
    experts: feed-forward networks per block, of which a token uses active_experts, in addition to shared_experts; the
        first dense_layers blocks, or others of that number, have a single one, of width dense_d_ff. shared_d_ff: width
        of all shared experts together, if they are not as wide as the others; shared_gate: a scale of their output for
        each token, by d_model weights. router_bias: a bias per expert.
    others: parts of the model beside these, if there are any.
    unread: parameters of parts that texts do not pass through, such as those for images.
    context: the longest sequence in training, 0 if unknown; of the target in an encoder-decoder. source_tokens: the
        fixed number of positions of the encoder, 0 if it is variable.
    quantized: the method by which the weights are stored, which costs do not heed; "" if they are not quantized.
    published, rounded: parameters; see above. stated: whether the source states them; otherwise they are those of a
        model that is built from it.
    """

    name: str
    d_model: int
    layers: int
    d_ff: int
    vocab: int
    sizes: Sizes
    published: int
    source: str
    design: str = "multi_head"
    layer_sizes: tuple[Sizes, ...] = ()
    attended: tuple[int, ...] = ()
    recurrent: tuple[Recurrence, ...] = ()
    decoder_layers: int = 0
    decoder_d_ff: int = 0
    causal: bool = True
    prefix: bool = False
    window: int | None = None
    layer_windows: tuple[int | None, ...] = ()
    chunked: bool = False
    gated: bool = False
    ff_bias: bool = False
    norm: str = "rms"
    norms: int | None = None
    final_norms: int = 1
    embedding_norms: int = 0
    positions: int = 0
    segments: int = 0
    pooler: bool = False
    output: str = "own"
    output_bias: bool = False
    relative: int = 0
    convolutions: tuple[Convolution, ...] = ()
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    shared_d_ff: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    dense_layers: int = 0
    dense_d_ff: int = 0
    others: Others | None = None
    unread: int = 0
    context: int = 0
    source_tokens: int = 0
    quantized: str = ""
    rounded: float = 0.0
    stated: bool = True

    @property
    def head_dim(self) -> int:
        """The size d_k of a head: as published, which need not be d_model / num_heads, or this quotient."""
        given, heads = self.size("head_dim"), self.size("num_heads")
        assert heads is not None
        return self.d_model // heads if given is None else given

    def size(self, name: str) -> int | None:
        """One of `sizes` by name, None if it is not given."""
        value = dict(self.sizes).get(name)
        return value if isinstance(value, int) else None

    @property
    def attention_layers(self) -> int:
        """The number of attention layers; each decoder layer of an encoder-decoder has two."""
        return self.self_attentions + 2 * self.decoder_layers

    @property
    def self_attentions(self) -> int:
        """How many of `layers` have attention."""
        return len(self.attended) or self.layers

    @property
    def attention_sizes(self) -> tuple[Sizes, ...]:
        """The sizes of each attention layer, in the order of `layer_sizes`."""
        return self.layer_sizes or (self.sizes,) * self.attention_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each attention in `layers`."""
        return self.layer_windows or (self.window,) * self.self_attentions

    def with_windows(self, windows: Sequence[int | None]) -> "ModelConfig":
        """The same with the window of each attention in `layers`; `window` is that of the first."""
        assert len(windows) == self.self_attentions
        each = tuple(windows)
        return replace(self, window=each[0], layer_windows=() if len(set(each)) == 1 else each)

    def with_layers(self, sizes: Sequence[Mapping[str, int | str]]) -> "ModelConfig":
        """The same with the sizes of each attention layer, in the order of `layer_sizes`; `sizes` are those of the
        first."""
        assert len(sizes) == self.attention_layers
        each = tuple(tuple(one.items()) for one in sizes)
        return replace(self, sizes=each[0], layer_sizes=() if len(set(each)) == 1 else each)


def find(name: str) -> ModelConfig:
    """The configuration of that name; case is ignored, and `_` equals `-`. ConfigError with close names if unknown."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key in CONFIGS:
        return CONFIGS[key]
    letters = key.replace("-", "")
    near = [known for known in CONFIGS if letters and known.replace("-", "").startswith(letters)]
    raise unknown_name("config", name, near or CONFIGS, listed=tr("`headwise plan list` lists all"))


def _heads(heads: int, kv_heads: int | None = None, head_dim: int | None = None, **more: int | str) -> tuple:
    given = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, **more}
    return tuple((name, value) for name, value in given.items() if value is not None)


def _vaswani(name: str, d_model: int, d_ff: int, heads: int, published: int) -> ModelConfig:
    return ModelConfig(
        name, d_model, 6, d_ff, 37_000, _heads(heads), published, "Vaswani et al. 2017, 1706.03762, Table 3 and §5.1",
        decoder_layers=6, causal=False, ff_bias=True, norm="layer", final_norms=0, output="tied", context=512,
        # "about 37,000" tokens; and 65 and 213 million fit no single vocabulary, but differences between rows fit.
        rounded=0.04,
    )  # fmt: skip


def _gpt(name: str, d_model: int, layers: int, heads: int, published: int, **more: object) -> ModelConfig:
    options = {
        "source": "Radford et al. 2019; openai-community/gpt2 weights", "ff_bias": True, "norm": "layer",
        "positions": 1024, "context": 1024, "output": "tied", **more,
    }  # fmt: skip
    return ModelConfig(name, d_model, layers, 4 * d_model, 50_257, _heads(heads, bias="qkvo"), published, **options)  # type: ignore[arg-type]


def _bert(name: str, d_model: int, layers: int, heads: int, published: int) -> ModelConfig:
    return ModelConfig(
        name, d_model, layers, 4 * d_model, 30_522, _heads(heads, bias="qkvo"), published,
        "Devlin et al. 2018, 1810.04805; google-bert uncased weights, without the heads of pre-training",
        causal=False, ff_bias=True, norm="layer", final_norms=0, embedding_norms=1, positions=512, segments=2,
        pooler=True, output="none", context=512,
    )  # fmt: skip


def _llama(
    name: str, d_model: int, layers: int, sizes: tuple, d_ff: int, vocab: int, published: int, context: int,
    source: str, **more: object,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        name, d_model, layers, d_ff, vocab, sizes, published, source, gated=True, context=context, **more  # type: ignore[arg-type]
    )  # fmt: skip


_LLAMA = "Touvron et al. 2023, 2302.13971, Table 2"
_LLAMA_2 = "Touvron et al. 2023, 2307.09288; meta-llama/Llama-2 weights"
_LLAMA_3 = "Grattafiori et al. 2024, 2407.21783, Table 3; meta-llama/Meta-Llama-3 weights"
_LLAMA_32 = "Meta 2024; meta-llama/Llama-3.2 weights"
_GEMMA = "Gemma team 2024, 2403.08295, Table 1; google/gemma weights"
_DEEPSEEK = {"num_heads": 128, "head_dim": 128, "value_dim": 128, "latent_dim": 512, "rope_dim": 64, "latent_norm": 1}

_ALL = [
    _vaswani("transformer-base", 512, 2048, 8, 65_000_000),
    _vaswani("transformer-big", 1024, 4096, 16, 213_000_000),
    _bert("bert-base", 768, 12, 12, 109_482_240),
    _bert("bert-large", 1024, 24, 16, 335_141_888),
    ModelConfig(
        "t5-base", 768, 12, 3072, 32_128, _heads(12), 222_903_552, "Raffel et al. 2019, 1910.10683; t5-base weights",
        decoder_layers=12, causal=False, output="tied", context=512, final_norms=2,
        relative=2 * 32 * 12,  # 32 buckets per head, in encoder and decoder
    ),
    _gpt("gpt-2-small", 768, 12, 12, 124_439_808),
    _gpt("gpt-2-medium", 1024, 24, 16, 354_823_168),
    _gpt("gpt-2-large", 1280, 36, 20, 774_030_080),
    _gpt("gpt-2-xl", 1600, 48, 25, 1_557_611_200),
    _gpt(
        "gpt-3", 12_288, 96, 96, 174_600_000_000, positions=2048, context=2048, rounded=5e-4,
        source="Brown et al. 2020, 2005.14165, Table 2.1 and D.1 (dense and sparse layers counted as dense)",
    ),
    _llama("llama-7b", 4096, 32, _heads(32), 11_008, 32_000, 6_738_415_616, 2048, _LLAMA),
    _llama("llama-13b", 5120, 40, _heads(40), 13_824, 32_000, 13_015_864_320, 2048, _LLAMA),
    _llama("llama-65b", 8192, 80, _heads(64), 22_016, 32_000, 65_285_660_672, 2048, _LLAMA),
    _llama("llama-2-7b", 4096, 32, _heads(32), 11_008, 32_000, 6_738_415_616, 4096, _LLAMA_2),
    _llama("llama-2-13b", 5120, 40, _heads(40), 13_824, 32_000, 13_015_864_320, 4096, _LLAMA_2),
    _llama("llama-2-70b", 8192, 80, _heads(64, 8), 28_672, 32_000, 68_976_648_192, 4096, _LLAMA_2),
    _llama("llama-3-8b", 4096, 32, _heads(32, 8), 14_336, 128_256, 8_030_261_248, 8192, _LLAMA_3),
    _llama("llama-3-70b", 8192, 80, _heads(64, 8), 28_672, 128_256, 70_553_706_496, 8192, _LLAMA_3),
    _llama(
        "llama-3.2-1b", 2048, 16, _heads(32, 8), 8192, 128_256, 1_235_814_400, 131_072, _LLAMA_32, output="tied"
    ),
    _llama(
        "mistral-7b", 4096, 32, _heads(32, 8), 14_336, 32_000, 7_241_732_096, 8192,
        "Jiang et al. 2023, 2310.06825, Table 1; mistralai/Mistral-7B-v0.1 weights", window=4096,
    ),
    _llama(
        "mixtral-8x7b", 4096, 32, _heads(32, 8), 14_336, 32_000, 46_702_792_704, 32_768,
        "Jiang et al. 2024, 2401.04088, Table 1; mistralai/Mixtral-8x7B-v0.1 weights", experts=8, active_experts=2,
    ),
    _llama(
        "qwen2-7b", 3584, 28, _heads(28, 4, bias="qkv"), 18_944, 152_064, 7_615_616_512, 32_768,
        "Yang et al. 2024, 2407.10671, Table 1; Qwen/Qwen2-7B weights",
    ),
    _llama(
        "qwen3-8b", 4096, 36, _heads(32, 8, 128, qk_norm=1), 12_288, 151_936, 8_190_735_360, 32_768,
        "Yang et al. 2025, 2505.09388, Table 1; Qwen/Qwen3-8B weights",
    ),
    _llama(
        "qwen3-30b-a3b", 2048, 48, _heads(32, 4, 128, qk_norm=1), 768, 151_936, 30_532_122_624, 32_768,
        "Yang et al. 2025, 2505.09388, Table 2; Qwen/Qwen3-30B-A3B weights", experts=128, active_experts=8,
    ),
    _llama(
        "phi-3-mini", 3072, 32, _heads(32), 8192, 32_064, 3_821_079_552, 4096,
        "Abdin et al. 2024, 2404.14219, §2; microsoft/Phi-3-mini-4k-instruct weights", window=2047,
    ),
    _llama(
        "gemma-2b", 2048, 18, _heads(8, 1, 256), 16_384, 256_000, 2_506_172_416, 8192, _GEMMA, output="tied"
    ),
    _llama(
        "gemma-7b", 3072, 28, _heads(16, 16, 256), 24_576, 256_000, 8_537_680_896, 8192, _GEMMA, output="tied"
    ),
    _llama(
        "gemma-2-9b", 3584, 42, _heads(16, 8, 256), 14_336, 256_000, 9_241_705_984, 8192,
        "Gemma team 2024, 2408.00118, Table 1; google/gemma-2-9b weights", output="tied", norms=4,
    ).with_windows((4096, None) * 21),
    _llama(
        "gemma-3-4b", 2560, 34, _heads(8, 4, 256, qk_norm=1), 10_240, 262_208, 4_300_079_472, 131_072,
        "Gemma team 2025, 2503.19786, §2; google/gemma-3-4b-pt weights, those for images included", output="tied",
        norms=4, unread=419_816_304,
    ).with_windows(tuple(None if layer % 6 == 5 else 1024 for layer in range(34))),
    _llama(
        "gpt-oss-20b", 2880, 24, _heads(64, 8, 64, bias="qkvo", learned_sinks=1), 2880, 201_088, 20_914_757_184,
        131_072, "OpenAI 2025, 2508.10925, Table 1; openai/gpt-oss-20b weights", experts=32, active_experts=4,
        ff_bias=True, router_bias=True,
    ).with_windows((128, None) * 12),
    ModelConfig(
        "falcon-7b", 4544, 32, 18_176, 65_024, _heads(71, 1), 6_921_720_704,
        "Almazrouei et al. 2023, 2311.16867; tiiuae/falcon-7b weights", norm="layer", norms=1, output="tied",
        context=2048,
    ),
    _llama(
        "deepseek-v2", 5120, 60, tuple({**_DEEPSEEK, "query_latent_dim": 1536}.items()), 1536, 102_400,
        235_741_434_880, 131_072, "DeepSeek-AI 2024, 2405.04434, §3.1.2; deepseek-ai/DeepSeek-V2 weights",
        design="latent", experts=160, active_experts=6, shared_experts=2, dense_layers=1, dense_d_ff=12_288,
    ),
    _llama(
        "deepseek-v3", 7168, 61, tuple({**_DEEPSEEK, "query_latent_dim": 1536}.items()), 2048, 129_280,
        671_026_404_352, 131_072,
        "DeepSeek-AI 2024, 2412.19437, §4.2; deepseek-ai/DeepSeek-V3 weights, without multi-token prediction and the "
        "biases that balance experts",
        design="latent", experts=256, active_experts=8, shared_experts=1, dense_layers=3, dense_d_ff=18_432,
    ),
]  # fmt: skip

CONFIGS = {config.name: config for config in _ALL}
