"""For authors of attention: inputs that hurt, an error budget, and a battery for anyone's function.

>>> from attemper import attend
>>> from attemper.testing import check_operator
>>> report = check_operator(attend, dtypes=["float32"])
>>> report.wrong
[]
"""

from ._budget import Comparison as Comparison
from ._budget import assert_within_budget as assert_within_budget
from ._budget import compare as compare
from ._inputs import KINDS as KINDS
from ._inputs import make_inputs as make_inputs
from ._operator import OperatorReport as OperatorReport
from ._operator import Row as Row
from ._operator import check_operator as check_operator

__all__ = [
    "KINDS",
    "Comparison",
    "OperatorReport",
    "Row",
    "assert_within_budget",
    "check_operator",
    "compare",
    "make_inputs",
]
