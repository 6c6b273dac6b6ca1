"""What heads do, which of them are similar, and which of them matter."""

from headwise.analysis.counterfactual import Counterfactual, counterfactual
from headwise.analysis.direct_effects import DirectEffects, direct_effects
from headwise.analysis.flow import (
    Rollout,
    attention_flow,
    circuit_similarity,
    composition,
    principal_angles,
    rollout,
    subspace_overlap,
    value_norms,
)  # fmt: skip
from headwise.analysis.head_roles import Mention, Roles, RoleScore, place_words, probe_induction, read_conllu, roles
from headwise.analysis.history import HeadHistory
from headwise.analysis.importance import (
    HardConcrete,
    HeadImportance,
    PruningCurve,
    ablation_importance,
    attention_knockout,
    gradient_importance,
    learn_gates,
    losses_without,
    pruning_curve,
    rank_agreement,
    taylor_importance,
)
from headwise.analysis.information import head_information, output_similarities
from headwise.analysis.linear import MapSpectrum, map_spectrum
from headwise.analysis.similarity import HeadSimilarity, map_divergence

__all__ = [
    "Counterfactual",
    "DirectEffects",
    "HardConcrete",
    "HeadHistory",
    "HeadImportance",
    "HeadSimilarity",
    "MapSpectrum",
    "Mention",
    "PruningCurve",
    "RoleScore",
    "Roles",
    "Rollout",
    "ablation_importance",
    "attention_flow",
    "attention_knockout",
    "circuit_similarity",
    "composition",
    "counterfactual",
    "direct_effects",
    "gradient_importance",
    "head_information",
    "learn_gates",
    "losses_without",
    "map_divergence",
    "map_spectrum",
    "output_similarities",
    "place_words",
    "principal_angles",
    "probe_induction",
    "pruning_curve",
    "rank_agreement",
    "read_conllu",
    "roles",
    "rollout",
    "subspace_overlap",
    "taylor_importance",
    "value_norms",
]
