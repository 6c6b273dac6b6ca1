"""The heads of models of any library: find, read, scale, record and observe them."""

from headwise.models.attaching import Attachment, attach, intervene
from headwise.models.find import KINDS, find_heads, register
from headwise.models.hooks import input_embedding
from headwise.models.recognise import NotFollowed, Recognised, Recognition, recognise
from headwise.models.replace.certifying import Certificate, Verdict, certify
from headwise.models.site import HeadSite, Kind, record_heads, scale_heads
from headwise.nn.layout import Layout, Part, Resizing
from headwise.publishing import AttentionCall, observe

__all__ = [
    "KINDS",
    "Attachment",
    "AttentionCall",
    "Certificate",
    "HeadSite",
    "Kind",
    "Layout",
    "NotFollowed",
    "Part",
    "Recognised",
    "Recognition",
    "Resizing",
    "Verdict",
    "attach",
    "certify",
    "find_heads",
    "input_embedding",
    "intervene",
    "observe",
    "recognise",
    "record_heads",
    "register",
    "scale_heads",
]
