"""headwise: multi-head attention that is fast and visible. The matrix is never stored, yet used as one.

>>> import torch, headwise as hw
>>> q, k, v = torch.randn(3, 1, 4, 256, 32)                     # [batch, heads, seq, head_dim]
>>> out, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
>>> amap[0, 3, 100:102, 0:102].shape                             # exact weights of any tile
torch.Size([2, 102])
>>> sorted(amap.measure("entropy", "max_logit"))                 # statistics of each head, in one pass
['entropy', 'max_logit']
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives; it is imported when first used, so that `import headwise` costs nothing.
_HOMES = {
    "attention": ["attend"],
    "map": ["AttentionMap"],
    "table": ["HeadColumn", "HeadTable"],
    "masks": ["Causal", "Dense", "Documents", "Everything", "HeadWindows", "Lengths", "Mask", "Sinks", "Window"],
    "scores": ["ALiBi", "Bias", "RelativeBias", "Score", "SinkLogits", "SoftCap", "t5_bias"],
    "stats": [
        "MEASURES", "ClassMass", "DuplicateMass", "InductionMass", "LocalMass", "Measure", "Measurements", "RowMeasure",
        "SinkMass", "TopKMass", "row_measure",
    ],
    "nn.positions": ["Rotary"],
    "cache": ["BudgetCache", "KVCache", "RaggedCache", "SlidingCache"],
    "kernels": ["use_kernel"],
    "kernels.eight_bits": ["EightBits"],
    "nn.registry": ["DESIGNS"],
    "nn.base": ["AttentionLayer"],
    "nn.block": ["TransformerBlock"],
    "nn.multi_head": ["MultiHeadAttention"],
    "nn.per_head": ["PerHeadAttention"],
    "nn.contraction": ["ContractionAttention"],
    "nn.single_head": ["SingleHeadAttention"],
    "nn.block_diagonal": ["BlockDiagonalAttention"],
    "nn.sparse_mixture": ["SparseHeadMixture"],
    "nn.mixture_of_heads": ["MixtureOfHeads"],
    "nn.gating": ["Gates"],
    "nn.grouped_mlp": ["GroupedMLPAttention"],
    "nn.head_mixing": ["HeadMixingAttention"],
    "nn.talking_heads": ["TalkingHeadsAttention"],
    "nn.latent": ["LatentAttention"],
    "nn.gated_output": ["GatedAttention"],
    "nn.convolution": ["ConvolutionAttention", "from_conv1d", "from_conv2d"],
    "parallel.heads": ["clip_gradients", "head_parallel_plan", "parallelize_heads", "whole_state"],
    "parallel.heads_gather": ["gather_map"],
    "parallel.heads_held": ["HeldHeads", "held_heads"],
    "models": ["Attachment", "HeadSite", "attach", "find_heads", "record_heads", "scale_heads"],
    "analysis.roles": ["Mention", "RoleScore", "Roles", "place", "probe_induction", "read_conllu", "roles"],
    "edit": [
        "budget", "budget_effect", "group_heads", "heal", "load_pruned", "merge_kv", "prune", "save_pruned",
    ],
    "models.adapters.observer": ["Observation", "observe"],
    "analysis.similarity": ["HeadSimilarity"],
    "analysis.outputs": ["output_similarities"],
    "analysis.divergence": ["map_divergence"],
    "analysis.subspaces": ["principal_angles", "subspace_overlap"],
    "analysis.circuits": ["circuit_similarity", "composition"],
    "analysis.spectrum": ["MapSpectrum", "map_spectrum"],
    "analysis.information": ["HeadInformation", "head_information"],
    "analysis.rollout": ["Rollout", "rollout"],
    "analysis.flow": ["attention_flow"],
    "analysis.importance": [
        "HardConcrete", "HeadImportance", "PruningCurve", "ablation_importance", "gradient_importance", "learn_gates",
        "losses_without", "pruning_curve", "rank_agreement", "taylor_importance",
    ],
    "analysis.history": ["HeadHistory"],
    "lm.loading": ["Reading", "Subject", "open_subject"],
    "reports.see": ["report"],
    "reports.matrix": ["write_matrix"],
    "reports.dynamics": ["write_dynamics"],
    "telemetry.gates": ["GateGradients", "gate_gradients"],
    "telemetry": [
        "Alarm", "AttentionAlarm", "AttentionWarning", "Clipped", "DeadHeadAlarm", "EntropyAlarm", "Finding",
        "History", "JSONLines", "MaxLogitAlarm", "NonFiniteAlarm", "Record", "Reduced", "SinkAlarm", "Summary",
        "TensorBoard", "WeightsAndBiases", "lightning_callback", "qk_clip", "trainer_callback", "watch",
    ],
    "corpus": ["CorpusMeasures", "measure_corpus"],
    "errors": [
        "CheckpointError", "ConfigError", "DTypeError", "DeviceError", "HeadwiseError", "KernelError", "ShapeError",
        "TextError",
    ],
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)

if TYPE_CHECKING:
    from headwise.analysis.circuits import circuit_similarity as circuit_similarity, composition as composition
    from headwise.analysis.divergence import map_divergence as map_divergence
    from headwise.analysis.flow import attention_flow as attention_flow
    from headwise.analysis.history import HeadHistory as HeadHistory
    from headwise.analysis.importance import (
        HardConcrete as HardConcrete,
        HeadImportance as HeadImportance,
        PruningCurve as PruningCurve,
        ablation_importance as ablation_importance,
        gradient_importance as gradient_importance,
        learn_gates as learn_gates,
        losses_without as losses_without,
        pruning_curve as pruning_curve,
        rank_agreement as rank_agreement,
        taylor_importance as taylor_importance,
    )
    from headwise.analysis.information import HeadInformation as HeadInformation, head_information as head_information
    from headwise.analysis.outputs import output_similarities as output_similarities
    from headwise.analysis.roles import (
        Mention as Mention,
        Roles as Roles,
        RoleScore as RoleScore,
        place as place,
        probe_induction as probe_induction,
        read_conllu as read_conllu,
        roles as roles,
    )
    from headwise.analysis.rollout import Rollout as Rollout, rollout as rollout
    from headwise.analysis.similarity import HeadSimilarity as HeadSimilarity
    from headwise.analysis.spectrum import MapSpectrum as MapSpectrum, map_spectrum as map_spectrum
    from headwise.analysis.subspaces import principal_angles as principal_angles, subspace_overlap as subspace_overlap
    from headwise.attention import attend as attend
    from headwise.cache import (
        BudgetCache as BudgetCache,
        KVCache as KVCache,
        RaggedCache as RaggedCache,
        SlidingCache as SlidingCache,
    )
    from headwise.corpus import CorpusMeasures as CorpusMeasures, measure_corpus as measure_corpus
    from headwise.edit import (
        budget as budget,
        budget_effect as budget_effect,
        group_heads as group_heads,
        heal as heal,
        load_pruned as load_pruned,
        merge_kv as merge_kv,
        prune as prune,
        save_pruned as save_pruned,
    )
    from headwise.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DeviceError as DeviceError,
        DTypeError as DTypeError,
        HeadwiseError as HeadwiseError,
        KernelError as KernelError,
        ShapeError as ShapeError,
        TextError as TextError,
    )
    from headwise.kernels import use_kernel as use_kernel
    from headwise.kernels.eight_bits import EightBits as EightBits
    from headwise.lm.loading import Reading as Reading, Subject as Subject, open_subject as open_subject
    from headwise.map import AttentionMap as AttentionMap
    from headwise.masks import (
        Causal as Causal,
        Dense as Dense,
        Documents as Documents,
        Everything as Everything,
        HeadWindows as HeadWindows,
        Lengths as Lengths,
        Mask as Mask,
        Sinks as Sinks,
        Window as Window,
    )
    from headwise.models import (
        Attachment as Attachment,
        HeadSite as HeadSite,
        attach as attach,
        find_heads as find_heads,
        record_heads as record_heads,
        scale_heads as scale_heads,
    )
    from headwise.models.adapters.observer import Observation as Observation, observe as observe
    from headwise.nn.base import AttentionLayer as AttentionLayer
    from headwise.nn.block import TransformerBlock as TransformerBlock
    from headwise.nn.block_diagonal import BlockDiagonalAttention as BlockDiagonalAttention
    from headwise.nn.contraction import ContractionAttention as ContractionAttention
    from headwise.nn.convolution import (
        ConvolutionAttention as ConvolutionAttention,
        from_conv1d as from_conv1d,
        from_conv2d as from_conv2d,
    )
    from headwise.nn.gated_output import GatedAttention as GatedAttention
    from headwise.nn.gating import Gates as Gates
    from headwise.nn.grouped_mlp import GroupedMLPAttention as GroupedMLPAttention
    from headwise.nn.head_mixing import HeadMixingAttention as HeadMixingAttention
    from headwise.nn.latent import LatentAttention as LatentAttention
    from headwise.nn.mixture_of_heads import MixtureOfHeads as MixtureOfHeads
    from headwise.nn.multi_head import MultiHeadAttention as MultiHeadAttention
    from headwise.nn.per_head import PerHeadAttention as PerHeadAttention
    from headwise.nn.positions import Rotary as Rotary
    from headwise.nn.registry import DESIGNS as DESIGNS
    from headwise.nn.single_head import SingleHeadAttention as SingleHeadAttention
    from headwise.nn.sparse_mixture import SparseHeadMixture as SparseHeadMixture
    from headwise.nn.talking_heads import TalkingHeadsAttention as TalkingHeadsAttention
    from headwise.parallel.heads import (
        clip_gradients as clip_gradients,
        head_parallel_plan as head_parallel_plan,
        parallelize_heads as parallelize_heads,
        whole_state as whole_state,
    )
    from headwise.parallel.heads_gather import gather_map as gather_map
    from headwise.parallel.heads_held import HeldHeads as HeldHeads, held_heads as held_heads
    from headwise.reports.dynamics import write_dynamics as write_dynamics
    from headwise.reports.matrix import write_matrix as write_matrix
    from headwise.reports.see import report as report
    from headwise.scores import (
        ALiBi as ALiBi,
        Bias as Bias,
        RelativeBias as RelativeBias,
        Score as Score,
        SinkLogits as SinkLogits,
        SoftCap as SoftCap,
        t5_bias as t5_bias,
    )
    from headwise.stats import (
        MEASURES as MEASURES,
        ClassMass as ClassMass,
        DuplicateMass as DuplicateMass,
        InductionMass as InductionMass,
        LocalMass as LocalMass,
        Measure as Measure,
        Measurements as Measurements,
        RowMeasure as RowMeasure,
        SinkMass as SinkMass,
        TopKMass as TopKMass,
        row_measure as row_measure,
    )
    from headwise.table import HeadColumn as HeadColumn, HeadTable as HeadTable
    from headwise.telemetry import (
        Alarm as Alarm,
        AttentionAlarm as AttentionAlarm,
        AttentionWarning as AttentionWarning,
        Clipped as Clipped,
        DeadHeadAlarm as DeadHeadAlarm,
        EntropyAlarm as EntropyAlarm,
        Finding as Finding,
        History as History,
        JSONLines as JSONLines,
        MaxLogitAlarm as MaxLogitAlarm,
        NonFiniteAlarm as NonFiniteAlarm,
        Record as Record,
        Reduced as Reduced,
        SinkAlarm as SinkAlarm,
        Summary as Summary,
        TensorBoard as TensorBoard,
        WeightsAndBiases as WeightsAndBiases,
        lightning_callback as lightning_callback,
        qk_clip as qk_clip,
        trainer_callback as trainer_callback,
        watch as watch,
    )
    from headwise.telemetry.gates import GateGradients as GateGradients, gate_gradients as gate_gradients


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    value = getattr(import_module(f"headwise.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
