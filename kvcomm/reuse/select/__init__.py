"""Which tokens of reused segments to compute again. One frozen dataclass a method; its fields are its configuration."""

from kvcomm.reuse.select.attended import Attended
from kvcomm.reuse.select.combine import Product, Union
from kvcomm.reuse.select.deviation import Deviation
from kvcomm.reuse.select.leading import Leading, LeadingShare
from kvcomm.reuse.select.predicted import PredictedError, SegmentError
from kvcomm.reuse.select.scene import Scene, Selected, Selection
from kvcomm.reuse.select.score import ByScore, PerSegment, Score, take

__all__ = [
    "Attended",
    "ByScore",
    "Deviation",
    "Leading",
    "LeadingShare",
    "PerSegment",
    "PredictedError",
    "Product",
    "Scene",
    "Score",
    "SegmentError",
    "Selected",
    "Selection",
    "Union",
    "take",
]
