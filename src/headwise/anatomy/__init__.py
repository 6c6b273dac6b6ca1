"""Where a model's heads are, whatever library made it: found, read, scaled and recorded one by one."""

from headwise.anatomy.find import KINDS as KINDS, find_heads as find_heads
from headwise.anatomy.site import HeadSite as HeadSite, Kind as Kind, Part as Part
from headwise.anatomy.taps import record_heads as record_heads, scale_heads as scale_heads
