"""What torch's operations are called, and what they make of their operands, as far as attention cares."""

from __future__ import annotations

from typing import Any

from torch import Tensor

SAME_NUMBERS = frozenset(
    (
        "view",
        "reshape",
        "transpose",
        "permute",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "__getitem__",
        "squeeze",
        "unsqueeze",
        "flatten",
        "unflatten",
        "contiguous",
        "clone",
        "to",
        "type",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "double",
        "narrow",
        "select",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "view_as",
        "reshape_as",
        "t",
        "detach",
        "__get__",
        "index_select",
        "gather",
        "roll",
        "flip",
    )
)
"""Operations that hand on some or all of the numbers they were given, perhaps rounded."""

NORMALISING = frozenset(("layer_norm", "rms_norm", "normalize", "group_norm", "batch_norm", "softmax"))
PROJECTING = frozenset(("linear", "bilinear", "addmm", "conv1d", "conv2d", "conv3d", "embedding"))
ACTIVATING = frozenset(
    ("silu", "gelu", "relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "mish", "hardswish", "softplus", "sigmoid")
)
MULTIPLYING = frozenset(("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"))
DIVIDING = frozenset(("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"))
SUBTRACTING = frozenset(("sub", "sub_", "subtract", "__sub__", "__isub__"))
ADDING = SUBTRACTING | {"add", "add_", "__add__", "__radd__", "__iadd__", "__rsub__"}
MASKING = ADDING | {"masked_fill", "masked_fill_", "where", "clamp", "clamp_", "clip", "nan_to_num"}
JOINING = frozenset(("cat", "concat", "concatenate", "index_copy", "index_copy_"))
EXPONENTIAL = frozenset(("exp", "exp_", "exp2", "exp2_"))
PRODUCTS = frozenset(("matmul", "__matmul__", "bmm", "einsum", "baddbmm"))


def terms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The operands of an operation that has two, in their order."""
    first = args[0] if args else kwargs.get("input")
    return first, kwargs.get("other", args[1] if len(args) > 1 else None)


def share(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> float:
    """What an addition multiplies one of its operands by."""
    turned = name == "__rsub__"
    if terms(args, kwargs)[0] is tensor:
        return -1.0 if turned else 1.0
    return float(kwargs.get("alpha", 1)) * (-1.0 if name in SUBTRACTING else 1.0)


def is_softmax(name: str) -> bool:
    return "softmax" in name or name == "softmin"


def softmax_axis(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The axis that a softmax sums over."""
    place = 4 if name == "gumbel_softmax" else 1
    axis = kwargs.get("dim", args[place] if len(args) > place else None)
    return axis if isinstance(axis, int) else -1
