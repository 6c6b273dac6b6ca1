"""Where a model's heads are, whatever library made it: found, read, scaled and recorded one by one."""

from headwise.models.adapters.observer import Observation, observe
from headwise.models.attaching import Attachment, attach
from headwise.models.find import KINDS, find_heads
from headwise.models.site import HeadSite, Kind, Part
from headwise.models.taps import record_heads, scale_heads

__all__ = [
    "KINDS",
    "Attachment",
    "HeadSite",
    "Kind",
    "Observation",
    "Part",
    "attach",
    "find_heads",
    "observe",
    "record_heads",
    "scale_heads",
]
