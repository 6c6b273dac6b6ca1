"""A record of every head while a model runs: `watch`, what it finds, where it writes, and what can be done about it."""

from headwise.telemetry.alarms import (
    Alarm as Alarm,
    AttentionAlarm as AttentionAlarm,
    AttentionWarning as AttentionWarning,
    DeadHeadAlarm as DeadHeadAlarm,
    EntropyAlarm as EntropyAlarm,
    Finding as Finding,
    MaxLogitAlarm as MaxLogitAlarm,
    NonFiniteAlarm as NonFiniteAlarm,
    SinkAlarm as SinkAlarm,
)
from headwise.telemetry.clip import Clipped as Clipped, qk_clip as qk_clip
from headwise.telemetry.record import Record as Record, Reduced as Reduced
from headwise.telemetry.summary import History as History, Summary as Summary
from headwise.telemetry.trainers import lightning_callback as lightning_callback, trainer_callback as trainer_callback
from headwise.telemetry.watching import watch as watch
from headwise.telemetry.writers import (
    JSONLines as JSONLines,
    TensorBoard as TensorBoard,
    WeightsAndBiases as WeightsAndBiases,
    Writer as Writer,
)
