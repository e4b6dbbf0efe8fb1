"""The walk X → Q, K, V → QKᵀ → ·scale → softmax → ·V of one's own sentence, with every number of it.

Importing this imports neither torch nor transformers; `see` does, when it is called.
"""

from __future__ import annotations

from ._call import Call as Call
from ._gaze import Gaze as Gaze
from ._gaze import gaze as gaze
from ._model import Seen as Seen
from ._model import see as see
from ._scores import Scores as Scores
from ._scores import of_vectors as of_vectors
from ._text import Sentence as Sentence
from ._walk import Walk as Walk
from ._walk import seeded as seeded
from ._walk import walk_through as walk_through
