"""A zoo of models with known attention, and faults to plant in them."""

from . import hugging, models, pretrained
from .faults import FAULTS as FAULTS
from .judge import Verdict as Verdict
from .judge import alarms as alarms
from .judge import judge as judge
from .judge import same as same
from .planting import Fault as Fault
from .planting import NotApplicable as NotApplicable
from .planting import NotIdentifiable as NotIdentifiable
from .planting import Planted as Planted
from .specimen import Architecture as Architecture
from .specimen import Place as Place
from .specimen import Specimen as Specimen
from .specimen import half as half


def architectures() -> list[Architecture]:
    """Every architecture: own, of Hugging Face, and with real weights where their packages are installed."""
    return [*models.architectures(), *hugging.architectures(), *pretrained.architectures()]
