"""Seeing the attention of any PyTorch model: `watch` over a run, `check` once."""

from ._check import check as check
from ._monitor import Monitor as Monitor
from ._monitor import Sample as Sample
from ._monitor import watch as watch
