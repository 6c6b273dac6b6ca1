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
from headwise.analysis.head_roles.relations import Mention, place_words, read_conllu
from headwise.analysis.head_roles.repeats import probe_induction
from headwise.analysis.head_roles.result import Roles, roles
from headwise.analysis.head_roles.score import RoleScore
from headwise.analysis.history import HeadHistory
from headwise.analysis.importance.ablation import ablation_importance, attention_knockout, losses_without
from headwise.analysis.importance.curve import PruningCurve, pruning_curve, rank_agreement
from headwise.analysis.importance.gradients import HardConcrete, gradient_importance, learn_gates, taylor_importance
from headwise.analysis.importance.losses import HeadImportance
from headwise.analysis.information import head_information, output_similarities
from headwise.analysis.linear import MapSpectrum, map_spectrum
from headwise.analysis.relevance import AttentionRelevance, Relevance, RelevanceMap, attention_lrp, relevance
from headwise.analysis.similarity import HeadSimilarity, map_divergence

__all__ = [
    "AttentionRelevance",
    "Counterfactual",
    "DirectEffects",
    "HardConcrete",
    "HeadHistory",
    "HeadImportance",
    "HeadSimilarity",
    "MapSpectrum",
    "Mention",
    "PruningCurve",
    "Relevance",
    "RelevanceMap",
    "RoleScore",
    "Roles",
    "Rollout",
    "ablation_importance",
    "attention_flow",
    "attention_knockout",
    "attention_lrp",
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
    "relevance",
    "roles",
    "rollout",
    "subspace_overlap",
    "taylor_importance",
    "value_norms",
]
