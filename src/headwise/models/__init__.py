"""Where a model's heads are, whatever library made it: found, read, scaled and recorded one by one."""

from headwise.models.attaching import Attachment as Attachment, attach as attach
from headwise.models.find import KINDS as KINDS, find_heads as find_heads, register as register
from headwise.models.site import HeadSite as HeadSite, Kind as Kind
from headwise.models.taps import record_heads as record_heads, scale_heads as scale_heads
from headwise.nn.layout import Layout as Layout, Part as Part, Resizing as Resizing
