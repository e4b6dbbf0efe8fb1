"""What torch's operations are called, as far as attention cares."""

from __future__ import annotations

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
ADDING = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__"))
MASKING = ADDING | {"masked_fill", "masked_fill_", "where", "clamp", "clamp_", "clip", "nan_to_num"}
PRODUCTS = frozenset(("matmul", "__matmul__", "bmm", "einsum", "baddbmm"))
