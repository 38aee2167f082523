"""The mixture-of-experts layer, one file a step: scores, choice, dispatch, experts, combine."""

from ermoe.nn.attention import Context, ContextAttention, attend, context
from ermoe.nn.balance import Balance, MeanBalance, OffsetBalance, update_balance
from ermoe.nn.eigen import EigenMoE
from ermoe.nn.experts import DenseLinear, EigenLinear, Experts, build_experts
from ermoe.nn.layer import MixtureLayer, moe_layers
from ermoe.nn.moe import MoE
from ermoe.nn.orthogonality import Retraction, no_weight_decay, orthogonality_loss, retract
from ermoe.nn.routers import Router, TopKRouter
from ermoe.nn.routing import Routing
from ermoe.nn.scores import EigenbasisScore, EnergyScore, LogitScore, PrototypeScore, Score

__all__ = [
    "Balance", "Context", "ContextAttention", "DenseLinear", "EigenLinear", "EigenMoE", "EigenbasisScore",
    "EnergyScore", "Experts", "LogitScore", "MeanBalance", "MixtureLayer", "MoE", "OffsetBalance", "PrototypeScore",
    "Retraction", "Router", "Routing", "Score", "TopKRouter", "attend", "build_experts", "context", "moe_layers",
    "no_weight_decay", "orthogonality_loss", "retract", "update_balance",
]  # fmt: skip
