"""Statistics of every head while a model runs: `watch`, its alarms and writers, gate gradients, and QK-clip."""

from headwise.telemetry.alarms import (
    Alarm,
    AttentionAlarm,
    AttentionWarning,
    DeadHeadAlarm,
    EntropyAlarm,
    Finding,
    JSONLines,
    MaxLogitAlarm,
    NonFiniteAlarm,
    SinkAlarm,
    TensorBoard,
    WeightsAndBiases,
    Writer,
)
from headwise.telemetry.clip import Clipped, qk_clip
from headwise.telemetry.gates import GateGradients, gate_gradients
from headwise.telemetry.ledger import History, Summary
from headwise.telemetry.ranks import Reduced
from headwise.telemetry.record import Record
from headwise.telemetry.watching import lightning_callback, trainer_callback, watch

__all__ = [
    "Alarm",
    "AttentionAlarm",
    "AttentionWarning",
    "Clipped",
    "DeadHeadAlarm",
    "EntropyAlarm",
    "Finding",
    "GateGradients",
    "History",
    "JSONLines",
    "MaxLogitAlarm",
    "NonFiniteAlarm",
    "Record",
    "Reduced",
    "SinkAlarm",
    "Summary",
    "TensorBoard",
    "WeightsAndBiases",
    "Writer",
    "gate_gradients",
    "lightning_callback",
    "qk_clip",
    "trainer_callback",
    "watch",
]
