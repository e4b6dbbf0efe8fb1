"""Every error that attemper raises on purpose, to the letter, and nothing else that escapes."""

import ast
import builtins
import inspect
import math
import random
import re
import textwrap
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import attemper
from attemper import Site, Vitals, _attend, _errors, _reading
from attemper._errors import brief, explain, unknown


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype=dtype)


def half(*shape):
    return zeros(*shape, dtype=np.float16)


QKV = zeros(2, 4, 5, 8), zeros(2, 4, 6, 8), zeros(2, 4, 6, 8)
READING = attemper.read(*QKV[:2])


class Foreign:
    def __repr__(self):
        return "Foreign()"


class Interface:
    def __array__(self, dtype=None, copy=None):
        return zeros(2, 4, 5, 8)


def nested():
    return torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(4, 8)], layout=torch.jagged)


def vitals(path="", heads=4):
    return Vitals.of(attemper.read(zeros(heads, 5, 8), zeros(heads, 6, 8)), Site(path=path, heads=heads))


def bad(**changes):
    """A call of attend that is right but for the changes."""
    return lambda: attemper.attend(**{**dict(zip("qkv", QKV, strict=True)), **changes})


SHAPE = attemper.ShapeError, ValueError
DTYPE = attemper.DtypeError, TypeError
FRAMEWORK = attemper.FrameworkError, TypeError
OPTION = attemper.OptionError, ValueError
BACKEND = attemper.BackendError, ValueError

# The fixes that several messages share.
ARRAY = "\n  Pass a NumPy array or a torch tensor."
SHARE = "\n  It is the share of weights to drop and lies in [0, 1)."
SEED = "\n  Pass a whole number of at least 0, or None to draw one from np.random."
CAP = "\n  Pass a positive number, or None for no cap."
FLAG = "\n  Pass True or False."
PAIR = "\n  Pass window=(left, right), either of them None for an open side."
SIDES = "\n  Sides count keys and cannot be negative; None leaves a side open."
WHOLE_SIDES = "\n  Pass whole numbers of keys, or None for an open side."
LENGTHS = "\n  A length lies between 0 and the number of keys, 6."
WHOLE = "\n  Pass whole numbers."
OFFSET = "\n  Pass a whole number, one per batch entry, or 'bottom-right'."
PER_BATCH = "\n  It holds one number per batch entry: shape (2,), or a single number."
PER_HEAD = "\n  It holds one number per query head: shape (4,)."
STARTS = "\n  Pass the starts of the packed sequences and the end: [0, 3, 8] packs 3 and 5."
RISE = "\n  Starts rise from 0 to the number of queries, 5."
FINITE = "\n  Pass a finite number."
SCALE = "\n  Pass a number, one number per head, or one of 'sqrt_dk', 'dk', 'unscaled'."
RULES = "\n  Choose from 'sqrt_dk', 'dk', 'sqrt_dmodel', 'unscaled', 'log_n'."
COUNT = "\n  Pass a whole number of at least 1."
STATS = "\n  Pass 'all', 'none', or names of Reading fields."
AUTO = "\n  Pass backend='auto' to let the operands choose."
ONE_SITE = "\n  Merge Vitals of one Site only."
SCHEMA = "\n  This version reads attemper.vitals/1."
FIELDS = ", ".join(map(repr, _reading.FIELDS))
BACKENDS = ", ".join(map(repr, _attend.BACKENDS))

# fmt: off
CASES = [
    # What is not an array
    ("q-list", bad(q=[[1.0, 2.0]]), *FRAMEWORK, """
        q is a list, not an array.
          Pass a NumPy array or a torch tensor: np.asarray(q, dtype=np.float32).
        """),
    ("k-tuple", bad(k=((1.0, 2.0),)), *FRAMEWORK, """
        k is a tuple, not an array.
          Pass a NumPy array or a torch tensor: np.asarray(k, dtype=np.float32).
        """),
    ("v-list", bad(v=[[1.0, 2.0]]), *FRAMEWORK, """
        v is a list, not an array.
          Pass a NumPy array or a torch tensor: np.asarray(v, dtype=np.float32).
        """),
    ("v-none", bad(v=None), *FRAMEWORK, """
        v is None, not an array.
          Pass a NumPy array or a torch tensor; attemper.read needs no v.
        """),
    ("q-none", lambda: attemper.read(None, zeros(3, 2)), *FRAMEWORK, "q is None, not an array." + ARRAY),
    ("q-number", bad(q=1.5), *FRAMEWORK, "q is a float, not an array." + ARRAY),
    ("q-string", bad(q="tokens"), *FRAMEWORK, "q is a str, not an array." + ARRAY),
    ("q-foreign", bad(q=Foreign()), *FRAMEWORK, "q is a Foreign, not an array." + ARRAY),
    ("q-foreign-with-array", bad(q=Interface()), *FRAMEWORK, """
        q is an Interface, not an array.
          Pass a NumPy array or a torch tensor: np.asarray(q).
        """),
    ("q-masked", bad(q=np.ma.masked_less(zeros(2, 4, 5, 8), 0)), *FRAMEWORK, """
        q is a masked array, and attention would ignore its mask.
          Pass q.filled(…), and hide keys with attn_mask.
        """),
    ("mask-list", bad(attn_mask=[[True, False]]), *FRAMEWORK, """
        attn_mask is a list, not an array.
          Pass a NumPy array or a torch tensor: np.asarray(attn_mask).
        """),
    ("mask-masked", bad(attn_mask=np.ma.masked_less(zeros(5, 6), 0)), *FRAMEWORK, """
        attn_mask is a masked array, and attention would ignore its mask.
          Pass attn_mask.filled(…).
        """),
    ("sinks-number", bad(sinks=1.0), *FRAMEWORK, "sinks is a float, not an array." + ARRAY),
    # Arrays of two frameworks or devices, and tensors without rows
    ("q-numpy-k-torch", bad(k=torch.zeros(2, 4, 6, 8)), *FRAMEWORK, """
        k is a torch array, but q is a numpy array.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 4, keys 6,    head_dim 8)  float32 cpu
          v  (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          Pass all operands from one framework: torch.from_numpy(…) or tensor.numpy().
        """),
    ("q-torch-v-numpy", bad(q=torch.zeros(2, 4, 5, 8), k=torch.zeros(2, 4, 6, 8)), *FRAMEWORK, """
        v is a numpy array, but q is a torch array.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 cpu
          k  (batch 2, heads 4, keys 6,    head_dim 8)  float32 cpu
          v  (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          Pass all operands from one framework: torch.from_numpy(…) or tensor.numpy().
        """),
    ("mask-torch", bad(attn_mask=torch.ones(5, 6, dtype=torch.bool)), *FRAMEWORK, """
        attn_mask is a torch array, but q is a numpy array.
          q          (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k          (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          attn_mask                    (queries 5, keys 6)      bool cpu
          Pass all operands from one framework: torch.from_numpy(…) or tensor.numpy().
        """),
    ("scale-torch", bad(scale=torch.ones(4)), *FRAMEWORK, """
        scale is a torch array, but q is a numpy array.
          q      (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          scale                               (heads 4)     float32 cpu
          Pass all operands from one framework: torch.from_numpy(…) or tensor.numpy().
        """),
    ("sinks-torch", bad(sinks=torch.ones(4)), *FRAMEWORK, """
        sinks is a torch array, but q is a numpy array.
          q      (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          sinks                               (heads 4)     float32 cpu
          Pass all operands from one framework: torch.from_numpy(…) or tensor.numpy().
        """),
    ("k-elsewhere", lambda: attemper.read(torch.zeros(5, 8), torch.zeros(6, 8, device="meta")), *FRAMEWORK, """
        k is on meta, but q is on cpu.
          q  (queries 5, head_dim 8)  float32 cpu
          k  (keys 6,    head_dim 8)  float32 meta
          Move it: k.to('cpu').
        """),
    ("k-sparse", lambda: attemper.read(torch.zeros(5, 8), torch.zeros(6, 8).to_sparse()), *FRAMEWORK, """
        k is a tensor of layout sparse_coo.
          Pass k.to_dense().
        """),
    ("k-nested", lambda: attemper.read(torch.zeros(5, 8), nested()), *FRAMEWORK, """
        k is a nested tensor, whose rows have no common length.
          Pass a padded tensor and key_lengths, or a packed one and cu_seqlens.
        """),
    # Element types
    ("q-int", bad(q=zeros(2, 4, 5, 8, dtype=np.int64)), *DTYPE, """
        q has dtype int64.
          q  (batch 2, heads 4, queries 5, head_dim 8)  int64 numpy
          Attention needs one of float16, bfloat16, float32, float64: cast q first.
        """),
    ("k-bool", bad(k=zeros(2, 4, 6, 8, dtype=np.bool_)), *DTYPE, """
        k has dtype bool.
          k  (batch 2, heads 4, keys 6, head_dim 8)  bool numpy
          Attention needs one of float16, bfloat16, float32, float64: cast k first.
        """),
    ("v-complex", bad(v=zeros(2, 4, 6, 8, dtype=np.complex64)), *DTYPE, """
        v has dtype complex64.
          v  (batch 2, heads 4, keys 6, head_dim 8)  complex64 numpy
          Attention needs one of float16, bfloat16, float32, float64: cast v first.
        """),
    ("q-float8", bad(q=zeros(2, 4, 5, 8, dtype=ml_dtypes.float8_e4m3fn)), *DTYPE, """
        q has dtype float8_e4m3fn.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float8_e4m3fn numpy
          Attention needs one of float16, bfloat16, float32, float64: cast q first.
        """),
    ("q-object", bad(q=zeros(2, 4, 5, 8, dtype=object)), *DTYPE, """
        q has dtype object.
          q  (batch 2, heads 4, queries 5, head_dim 8)  object numpy
          Attention needs one of float16, bfloat16, float32, float64: cast q first.
        """),
    ("k-wider", bad(k=zeros(2, 4, 6, 8, dtype=np.float64)), *DTYPE, """
        k is float64, but q is float32.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 4, keys 6,    head_dim 8)  float64 numpy
          v  (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          Attention runs in one dtype: cast one of them.
        """),
    ("v-bfloat16", bad(v=zeros(2, 4, 6, 8, dtype=ml_dtypes.bfloat16)), *DTYPE, """
        v is bfloat16, but q is float32.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          v  (batch 2, heads 4, keys 6,    head_dim 8)  bfloat16 numpy
          Attention runs in one dtype: cast one of them.
        """),
    ("mask-int", bad(attn_mask=zeros(5, 6, dtype=np.int32)), *DTYPE, """
        attn_mask has dtype int32.
          q          (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k          (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          attn_mask                    (queries 5, keys 6)      int32 numpy
          Pass bool (True = attend) or floating values that are added to the scores.
        """),
    ("sinks-int", bad(sinks=zeros(4, dtype=np.int64)), *DTYPE, """
        sinks has dtype int64.
          sinks  (heads 4)  int64 numpy
          Attention needs one of float16, bfloat16, float32, float64: cast sinks first.
        """),
    ("scale-int", bad(scale=zeros(4, dtype=np.int64)), *DTYPE, """
        scale has dtype int64.
          scale  (heads 4)  int64 numpy
          Attention needs one of float16, bfloat16, float32, float64: cast scale first.
        """),
    # Shapes of q, k and v
    ("design-example", lambda: attemper.read(half(2, 8, 128, 64), half(2, 8, 128, 32)), *SHAPE, """
        k has head_dim 32, but q has head_dim 64.
          q  (batch 2, heads 8, queries 128, head_dim 64)  float16 numpy
          k  (batch 2, heads 8, keys 128,    head_dim 32)  float16 numpy
          q·k needs one head_dim.
        """),
    ("head-dim", bad(k=zeros(2, 4, 6, 16)), *SHAPE, """
        k has head_dim 16, but q has head_dim 8.
          q  (batch 2, heads 4, queries 5, head_dim 8)   float32 numpy
          k  (batch 2, heads 4, keys 6,    head_dim 16)  float32 numpy
          v  (batch 2, heads 4, keys 6,    head_dim 8)   float32 numpy
          q·k needs one head_dim.
        """),
    ("rank-0", bad(k=zeros()), *SHAPE, """
        k has rank 0.
          q  (batch 2, heads 4, queries 5, head_dim 8)    float32 numpy
          k                                           ()  float32 numpy
          v  (batch 2, heads 4, keys 6,    head_dim 8)    float32 numpy
          attemper takes (*batch, heads, length, head_dim) of rank 2 to 5.
        """),
    ("rank-1", bad(q=zeros(8)), *SHAPE, """
        q has rank 1.
          q                            (head_dim 8)  float32 numpy
          k  (batch 2, heads 4, keys 6, head_dim 8)  float32 numpy
          v  (batch 2, heads 4, keys 6, head_dim 8)  float32 numpy
          attemper takes (*batch, heads, length, head_dim) of rank 2 to 5.
        """),
    ("rank-6", bad(v=zeros(1, 1, 2, 4, 6, 8)), *SHAPE, """
        v has rank 6.
          q                    (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k                    (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          v  (batch 1, batch 1, batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          attemper takes (*batch, heads, length, head_dim) of rank 2 to 5.
        """),
    ("lengths", bad(v=zeros(2, 4, 7, 8)), *SHAPE, """
        v has 7 keys, but k has 6 keys.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          v  (batch 2, heads 4, keys 7,    head_dim 8)  float32 numpy
          Each key needs one value: k and v must have the same length.
        """),
    ("heads-do-not-divide", bad(k=zeros(2, 3, 6, 8), v=zeros(2, 3, 6, 8), enable_gqa=True), *SHAPE, """
        k has 3 heads, but q has 4 heads.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 3, keys 6,    head_dim 8)  float32 numpy
          v  (batch 2, heads 3, keys 6,    head_dim 8)  float32 numpy
          The number of key heads must divide the number of query heads.
        """),
    ("heads-without-gqa", bad(k=zeros(2, 2, 6, 8), v=zeros(2, 2, 6, 8)), *SHAPE, """
        k has 2 heads, but q has 4 heads.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 2, keys 6,    head_dim 8)  float32 numpy
          v  (batch 2, heads 2, keys 6,    head_dim 8)  float32 numpy
          For grouped heads (2 query heads to a key head) pass enable_gqa=True.
        """),
    ("more-key-heads", bad(k=zeros(2, 8, 6, 8), v=zeros(2, 8, 6, 8), enable_gqa=True), *SHAPE, """
        k has 8 heads, but q has 4 heads.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 8, keys 6,    head_dim 8)  float32 numpy
          v  (batch 2, heads 8, keys 6,    head_dim 8)  float32 numpy
          The number of key heads must divide the number of query heads.
        """),
    ("v-heads", bad(v=zeros(2, 2, 6, 8)), *SHAPE, """
        v has 2 heads, but k has 4 heads.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          v  (batch 2, heads 2, keys 6,    head_dim 8)  float32 numpy
          Each key head needs one value head: give k and v the same number of heads.
        """),
    ("v-heads-against-q", bad(k=zeros(2, 1, 6, 8), v=zeros(2, 3, 6, 8)), *SHAPE, """
        v has 3 heads, but q has 4 heads.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 1, keys 6,    head_dim 8)  float32 numpy
          v  (batch 2, heads 3, keys 6,    head_dim 8)  float32 numpy
          The number of key heads must divide the number of query heads.
        """),
    ("batch-k", bad(k=zeros(3, 4, 6, 8)), *SHAPE, """
        k has batch 3, but q has batch 2.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 3, heads 4, keys 6,    head_dim 8)  float32 numpy
          v  (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          Batch axes must be equal or 1.
        """),
    ("batch-v", bad(v=zeros(3, 4, 6, 8)), *SHAPE, """
        v has batch 3, but q and k have batch 2.
          q  (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k  (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          v  (batch 3, heads 4, keys 6,    head_dim 8)  float32 numpy
          Batch axes must be equal or 1.
        """),
    ("batch-two-axes", bad(q=zeros(7, 1, 4, 5, 8), v=zeros(7, 3, 4, 6, 8)), *SHAPE, """
        v has batch 7 × 3, but q and k have batch 7 × 2.
          q  (batch 7, batch 1, heads 4, queries 5, head_dim 8)  float32 numpy
          k           (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          v  (batch 7, batch 3, heads 4, keys 6,    head_dim 8)  float32 numpy
          Batch axes must be equal or 1.
        """),
    # Shapes of everything else
    ("mask-shape", bad(attn_mask=zeros(6, 5)), *SHAPE, """
        attn_mask has shape (6, 5), which does not broadcast to (2, 4, 5, 6).
          q          (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k          (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          attn_mask                    (queries 6, keys 5)      float32 numpy
          A mask covers (*batch, heads, queries, keys); axes may be 1 or missing on the left.
        """),
    ("mask-heads", bad(attn_mask=np.ones((3, 5, 6), dtype=bool)), *SHAPE, """
        attn_mask has shape (3, 5, 6), which does not broadcast to (2, 4, 5, 6).
          q          (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k          (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          attn_mask           (heads 3, queries 5, keys 6)      bool numpy
          A mask covers (*batch, heads, queries, keys); axes may be 1 or missing on the left.
        """),
    ("mask-axes", bad(attn_mask=np.ones((1, 2, 4, 5, 6), dtype=bool)), *SHAPE, """
        attn_mask has shape (1, 2, 4, 5, 6), which does not broadcast to (2, 4, 5, 6).
          q                   (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k                   (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          attn_mask  (batch 1, batch 2, heads 4, queries 5, keys 6)      bool numpy
          A mask covers (*batch, heads, queries, keys); axes may be 1 or missing on the left.
        """),
    ("scale-shape", bad(scale=zeros(3)), *SHAPE, """
        scale has shape (3,).
          q      (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k      (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          scale                               (heads 3)     float32 numpy
          It holds one number per query head: shape (4,).
        """),
    ("scale-list-shape", bad(scale=[1, 2]), *SHAPE, """
        scale has shape (2,).
          q      (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k      (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          scale                               (heads 2)     float64 numpy
          It holds one number per query head: shape (4,).
        """),
    ("sinks-shape", bad(sinks=zeros(2, 4)), *SHAPE, """
        sinks has shape (2, 4).
          q      (batch 2, heads 4, queries 5, head_dim 8)  float32 numpy
          k      (batch 2, heads 4, keys 6,    head_dim 8)  float32 numpy
          sinks                    (batch 2,   heads 4)     float32 numpy
          It holds one number per query head: shape (4,).
        """),
    ("key-lengths-shape", bad(key_lengths=[6, 6, 6]), *SHAPE, "key_lengths has shape (3,)." + PER_BATCH),
    ("key-lengths-no-batch", lambda: attemper.read(zeros(5, 8), zeros(6, 8), key_lengths=[6]), *SHAPE, """
        key_lengths has shape (1,).
          It holds one number per batch entry: there are no batch axes, so a single number.
        """),
    ("query-offset-shape", bad(query_offset=np.zeros((2, 4), dtype=np.int64)), *SHAPE,
     "query_offset has shape (2, 4)." + PER_BATCH),
    ("cu-seqlens-2d", bad(cu_seqlens=np.zeros((2, 3), dtype=np.int64)), *SHAPE,
     "cu_seqlens has shape (2, 3)." + STARTS),
    ("cu-seqlens-number", bad(cu_seqlens=5), *SHAPE, "cu_seqlens has shape ()." + STARTS),
    ("cu-seqlens-pair-2d", bad(cu_seqlens=([[0, 5]], [[0, 6]])), *SHAPE, "cu_seqlens[0] has shape (1, 2)." + STARTS),
    ("cu-seqlens-counts", bad(cu_seqlens=([0, 2, 5], [0, 6])), *SHAPE, """
        cu_seqlens has 2 sequences of queries, but 1 of keys.
          Both sides describe the same sequences: pass as many starts for the keys as for the queries.
        """),
    # Dropout, softcap, flags
    ("dropout-negative", bad(dropout_p=-0.1), *OPTION, "dropout_p is -0.1." + SHARE),
    ("dropout-one", bad(dropout_p=1.0), *OPTION, "dropout_p is 1.0." + SHARE),
    ("dropout-more", bad(dropout_p=1.5), *OPTION, "dropout_p is 1.5." + SHARE),
    ("dropout-nan", bad(dropout_p=math.nan), *OPTION, "dropout_p is nan." + SHARE),
    ("dropout-string", bad(dropout_p="x"), *OPTION, "dropout_p is 'x'." + SHARE),
    ("dropout-none", bad(dropout_p=None), *OPTION, "dropout_p is None." + SHARE),
    ("dropout-bool", bad(dropout_p=False), *OPTION, "dropout_p is False." + SHARE),
    ("dropout-array", bad(dropout_p=np.array([0.1, 0.2])), *OPTION, "dropout_p is array([0.1, 0.2])." + SHARE),
    ("seed-negative", bad(seed=-1), *OPTION, "seed is -1." + SEED),
    ("seed-float", bad(seed=1.0), *OPTION, "seed is 1.0." + SEED),
    ("seed-bool", bad(seed=True), *OPTION, "seed is True." + SEED),
    ("softcap-zero", bad(softcap=0), *OPTION, "softcap is 0." + CAP),
    ("softcap-negative", bad(softcap=-30.0), *OPTION, "softcap is -30.0." + CAP),
    ("softcap-nan", bad(softcap=math.nan), *OPTION, "softcap is nan." + CAP),
    ("softcap-inf", bad(softcap=math.inf), *OPTION, "softcap is inf." + CAP),
    ("softcap-string", bad(softcap="30"), *OPTION, "softcap is '30'." + CAP),
    ("softcap-bool", bad(softcap=True), *OPTION, "softcap is True." + CAP),
    ("softcap-list", bad(softcap=[30.0]), *OPTION, "softcap is [30.0]." + CAP),
    ("is-causal-string", bad(is_causal="no"), *OPTION, "is_causal is 'no'." + FLAG),
    ("enable-gqa-none", bad(enable_gqa=None), *OPTION, "enable_gqa is None." + FLAG),
    # Masks by position
    ("window-number", bad(window=3), *OPTION, "window is 3, not a pair." + PAIR),
    ("window-triple", bad(window=(1, 2, 3)), *OPTION, "window is (1, 2, 3), not a pair." + PAIR),
    ("window-bytes", bad(window=b"ab"), *OPTION, "window is b'ab', not a pair." + PAIR),
    ("window-left", bad(window=(-1, 0)), *OPTION, "window has left side -1." + SIDES),
    ("window-right", bad(window=(None, -2)), *OPTION, "window has right side -2." + SIDES),
    ("window-float", bad(window=(1.5, 0)), *OPTION, "window has left side 1.5." + WHOLE_SIDES),
    ("window-bool", bad(window=(0, True)), *OPTION, "window has right side True." + WHOLE_SIDES),
    ("key-lengths-long", bad(key_lengths=[6, 7]), *OPTION, "key_lengths contains 7." + LENGTHS),
    ("key-lengths-negative", bad(key_lengths=[-1, 6]), *OPTION, "key_lengths contains -1." + LENGTHS),
    ("key-lengths-float", bad(key_lengths=[1.0, 2.0]), *OPTION, "key_lengths is [1.0, 2.0]." + WHOLE),
    ("key-lengths-float-array", bad(key_lengths=zeros(2)), *OPTION, "key_lengths has dtype float32." + WHOLE),
    ("key-lengths-ragged", bad(key_lengths=[[1, 2], [3]]), *OPTION, "key_lengths is [[1, 2], [3]]." + WHOLE),
    ("key-lengths-string", bad(key_lengths="all"), *OPTION, "key_lengths is 'all'." + WHOLE),
    ("key-lengths-masked", bad(key_lengths=np.ma.masked_equal([6, 0], 0)), *OPTION,
     "key_lengths is masked_array(data=[6, --], mask=[False, True], fill_value=0)." + WHOLE),
    ("query-offset-string", bad(query_offset="bottom_right"), *OPTION, """
        query_offset 'bottom_right' is not known.
          Pass a number, one per batch entry, or 'bottom-right'.
        """),
    ("query-offset-none", bad(query_offset=None), *OPTION, "query_offset is None." + OFFSET),
    ("query-offset-float", bad(query_offset=1.0), *OPTION, "query_offset is 1.0." + OFFSET),
    ("query-offset-bool", bad(query_offset=True), *OPTION, "query_offset is True." + OFFSET),
    ("query-offset-far", bad(query_offset=2**62), *OPTION, """
        query_offset contains 4611686018427387904.
          Pass numbers between −2⁶¹ and 2⁶¹.
        """),
    ("cu-seqlens-start", bad(cu_seqlens=([1, 5], [0, 6])), *OPTION, "cu_seqlens[0] is [1, 5]." + RISE),
    ("cu-seqlens-end", bad(cu_seqlens=([0, 2, 5], [0, 2, 5])), *OPTION, """
        cu_seqlens[1] is [0, 2, 5].
          Starts rise from 0 to the number of keys, 6.
        """),
    ("cu-seqlens-decreasing", bad(cu_seqlens=([0, 4, 2, 5], [0, 2, 4, 6])), *OPTION,
     "cu_seqlens[0] is [0, 4, 2, 5]." + RISE),
    ("cu-seqlens-one-for-two-lengths", bad(cu_seqlens=np.array([0, 5])), *SHAPE, """
        cu_seqlens is one array for 5 queries and 6 keys.
          Pass a pair: cu_seqlens=(query_starts, key_starts).
        """),
    ("cu-seqlens-float", bad(cu_seqlens=([0.0, 5.0], [0, 6])), *OPTION, "cu_seqlens[0] is [0.0, 5.0]." + WHOLE),
    ("cu-seqlens-long", bad(cu_seqlens=np.arange(100)), *OPTION, "cu_seqlens is [ 0,  1,  2, ..., 97, 98, 99]." + RISE),
    ("cu-seqlens-with-key-lengths", bad(cu_seqlens=([0, 5], [0, 6]), key_lengths=6), *OPTION, """
        key_lengths and cu_seqlens were both given.
          Give each packed sequence its length in cu_seqlens=(query_starts, key_starts).
        """),
    # The scale
    ("scale-nan", bad(scale=math.nan), *OPTION, "scale is nan." + FINITE),
    ("scale-inf", bad(scale=-math.inf), *OPTION, "scale is -inf." + FINITE),
    ("scale-unknown", bad(scale="sqrt_d"), *OPTION, """
        scale 'sqrt_d' is not known.
          Did you mean 'sqrt_dk'? Choose from 'sqrt_dk', 'dk', 'unscaled'.
        """),
    ("scale-nothing-near", bad(scale="1/8"), *OPTION, """
        scale '1/8' is not known.
          Choose from 'sqrt_dk', 'dk', 'unscaled'.
        """),
    ("scale-sqrt-dmodel", bad(scale="sqrt_dmodel"), *OPTION, """
        scale 'sqrt_dmodel' needs model_dim.
          Pass its number: scale=attemper.scale_for('sqrt_dmodel', 8, model_dim=…).
        """),
    ("scale-log-n", bad(scale="log_n"), *OPTION, """
        scale 'log_n' needs keys.
          Pass its number: scale=attemper.scale_for('log_n', 8, keys=…).
        """),
    ("scale-object", bad(scale=Foreign()), *OPTION, "scale is Foreign()." + SCALE),
    ("scale-bool", bad(scale=True), *OPTION, "scale is True." + SCALE),
    ("scale-bytes", bad(scale=b"1"), *OPTION, "scale is b'1'." + SCALE),
    ("scale-complex", bad(scale=1j), *OPTION, "scale is 1j." + SCALE),
    ("scale-head-nan", bad(scale=[1.0, math.nan, 1.0, 1.0]), *OPTION, """
        scale is not finite in every head.
          Pass finite numbers.
        """),
    ("scale-list-of-strings", bad(scale=["1", "1", "1", "1"]), *OPTION, "scale is ['1', '1', '1', '1']." + PER_HEAD),
    ("sinks-ragged", bad(sinks=[[1.0], [1.0, 2.0]]), *OPTION, "sinks is [[1.0], [1.0, 2.0]]." + PER_HEAD),
    ("rule-unknown", lambda: attemper.scale_for("sqrt_dmodels", 64), *OPTION, """
        scale rule 'sqrt_dmodels' is not known.
          Did you mean 'sqrt_dmodel'? Choose from 'sqrt_dk', 'dk', 'sqrt_dmodel', 'unscaled', 'log_n'.
        """),
    ("rule-none", lambda: attemper.scale_for(None, 64), *OPTION, "scale rule None is not known." + RULES),
    ("rule-list", lambda: attemper.scale_for(["dk"], 64), *OPTION, "scale rule ['dk'] is not known." + RULES),
    ("rule-needs-model-dim", lambda: attemper.scale_for("sqrt_dmodel", 64), *OPTION, """
        The rule 'sqrt_dmodel' needs model_dim.
          Pass model_dim: scale_for('sqrt_dmodel', 64, model_dim=…).
        """),
    ("rule-needs-keys", lambda: attemper.scale_for("log_n", 64), *OPTION, """
        The rule 'log_n' needs keys.
          Pass keys: scale_for('log_n', 64, keys=…).
        """),
    ("rule-keys-zero", lambda: attemper.scale_for("log_n", 64, keys=0), *OPTION,
     "keys is 0 in scale_for('log_n')." + COUNT),
    ("rule-model-dim-string", lambda: attemper.scale_for("sqrt_dmodel", 64, model_dim="512"), *OPTION,
     "model_dim is '512' in scale_for('sqrt_dmodel')." + COUNT),
    ("head-dim-zero", lambda: attemper.scale_for("sqrt_dk", 0), *OPTION,
     "head_dim is 0 in scale_for('sqrt_dk')." + COUNT),
    ("head-dim-negative", lambda: attemper.scale_for("sqrt_dk", -1), *OPTION,
     "head_dim is -1 in scale_for('sqrt_dk')." + COUNT),
    ("head-dim-half", lambda: attemper.scale_for("dk", 1.5), *OPTION, "head_dim is 1.5 in scale_for('dk')." + COUNT),
    ("head-dim-none", lambda: attemper.scale_for("dk", None), *OPTION, "head_dim is None in scale_for('dk')." + COUNT),
    ("head-dim-nan", lambda: attemper.scale_for("dk", math.nan), *OPTION,
     "head_dim is nan in scale_for('dk')." + COUNT),
    # What to measure, and where
    ("stats-near", bad(stats="entropi"), *OPTION,
     "statistic 'entropi' is not known.\n  Did you mean 'entropy'? Choose from 'all', 'none', " + FIELDS + "."),
    ("stats-among-names", bad(stats=["entropy", "floww"]), *OPTION,
     "statistic 'floww' is not known.\n  Did you mean 'flow'? Choose from " + FIELDS + "."),
    ("stats-all-among-names", bad(stats=["all"]), *OPTION,
     "statistic 'all' is not known.\n  Choose from " + FIELDS + "."),
    ("stats-number", bad(stats=3), *OPTION, "stats is 3." + STATS),
    ("stats-dict", bad(stats={"entropy": True}), *OPTION, "stats is {'entropy': True}." + STATS),
    ("backend-near", bad(backend="nunpy"), *OPTION,
     "backend 'nunpy' is not known.\n  Did you mean 'numpy'? Choose from 'auto', " + BACKENDS + "."),
    ("backend-none", bad(backend=None), *OPTION, "backend None is not known.\n  Choose from 'auto', " + BACKENDS + "."),
    ("differentiable-numpy", bad(differentiable=True), *OPTION, """
        differentiable=True, but NumPy arrays carry no gradients.
          Pass torch tensors, or leave differentiable=False.
        """),
    ("mask-and-causal", lambda: attemper.scaled_dot_product_attention(*QKV, zeros(5, 6), is_causal=True), *OPTION, """
        attn_mask and is_causal were both given.
          Put the causal part into attn_mask, or call attemper.attend, which combines them.
        """),
    ("torch-named", lambda: attemper.attend(*(torch.zeros(5, 8),) * 3, backend="numpy"), *BACKEND,
     "backend 'numpy' cannot take this call: it computes on NumPy arrays." + AUTO),
    ("numpy-named", lambda: attemper.attend(*QKV, backend="torch"), *BACKEND,
     "backend 'torch' cannot take this call: it computes on torch tensors." + AUTO),
    ("torch-lengths", lambda: attemper.attend(*(torch.zeros(1, 1, 5, 8),) * 3, key_lengths=torch.ones(1)), *OPTION,
     "key_lengths has dtype float32.\n  Pass whole numbers."),
    ("torch-lengths-bool", lambda: attemper.attend(*(torch.zeros(1, 1, 5, 8),) * 3, key_lengths=torch.tensor([True])),
     *OPTION, "key_lengths has dtype bool.\n  Pass whole numbers."),
    ("torch-lengths-long", lambda: attemper.attend(*(torch.zeros(1, 1, 5, 8),) * 3, key_lengths=torch.tensor([6])),
     *OPTION, "key_lengths contains 6.\n  A length lies between 0 and the number of keys, 5."),
    ("torch-starts", lambda: attemper.attend(*(torch.zeros(1, 5, 8),) * 3, cu_seqlens=torch.tensor([0, 4])),
     *OPTION, "cu_seqlens is [0, 4].\n  Starts rise from 0 to the number of queries, 5."),
    ("not-given", lambda: attemper.read(*(torch.zeros(1, 5, 8),) * 2, stats="max_logit", backend="identities"),
     *BACKEND, "backend 'identities' cannot give max_logit.\n  Leave it out of stats, or pass backend='auto'."),
    ("sinks-infinite", lambda: attemper.attend(*QKV, sinks=np.full(4, np.inf)), *OPTION,
     "sinks contains NaN or infinity.\n  Pass finite logits, or −inf for no sink."),
    ("torch-sinks-list", lambda: attemper.attend(*(torch.zeros(1, 5, 8),) * 3, sinks=[math.nan]), *OPTION,
     "sinks contains NaN or infinity.\n  Pass finite logits, or −inf for no sink."),
    ("torch-scale-list", lambda: attemper.attend(*(torch.zeros(1, 5, 8),) * 3, scale=[math.inf]), *OPTION,
     "scale is not finite in every head.\n  Pass finite numbers."),
    # Vitals
    ("vitals-site", lambda: Vitals.of(READING, Site(heads=3)), *SHAPE, """
        The Reading has 4 heads, but its Site has 3.
          Pass the Site of the call that was read.
        """),
    ("vitals-rows", lambda: Vitals.of(READING, rows=zeros(2, 4, 5)), *SHAPE, """
        rows has shape (2, 4, 5), but the Reading's rows are (2, 5).
          Pass one bool per batch entry and query.
        """),
    ("vitals-padding-weight", lambda: Vitals.of(READING, padding_weight=zeros(2, 5)), *SHAPE, """
        padding_weight has shape (2, 5), but the Reading's is (2, 4, 5).
          Pass one number per row.
        """),
    ("vitals-no-visible-keys", lambda: Vitals.of(attemper.read(*QKV[:2], stats="entropy")), *OPTION, """
        The Reading has no visible_keys to weigh its rows by.
          Read with stats='all', or name 'visible_keys' among the stats.
        """),
    ("vitals-merge-paths", lambda: vitals("layers.0").merge(vitals("layers.1")), *SHAPE,
     "Cannot merge the Vitals of layers.0 with 4 heads with those of layers.1 with 4 heads." + ONE_SITE),
    ("vitals-merge-heads", lambda: vitals().merge(vitals(heads=2)), *SHAPE,
     "Cannot merge the Vitals of (no path) with 4 heads with those of (no path) with 2 heads." + ONE_SITE),
    ("vitals-schema", lambda: Vitals.from_dict({**vitals().to_dict(), "schema": "attemper.vitals/2"}), *OPTION,
     "The record's schema is 'attemper.vitals/2'." + SCHEMA),
    ("vitals-incomplete", lambda: Vitals.from_dict({n: v for n, v in vitals().to_dict().items() if n != "flow"}),
     *OPTION, "The record lacks flow.\n  Pass what Vitals.to_dict wrote, whole."),
    ("vitals-no-schema", lambda: Vitals.from_dict({}), *OPTION, "The record's schema is None." + SCHEMA),
]
# fmt: on

HUGE = np.broadcast_to(np.float32(0), (1, 2**20, 8))  # a million rows in the memory of one number
TOO_LARGE = lambda: attemper.trace(HUGE, HUGE, HUGE)  # noqa: E731


@pytest.mark.parametrize(("call", "error", "builtin", "text"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_text(call, error, builtin, text):
    with pytest.raises(builtin) as raised:
        call()
    assert type(raised.value) is error
    assert str(raised.value) == textwrap.dedent(text).strip()
    # No traceback of our own workings above the message.
    assert raised.value.__context__ is None or raised.value.__suppress_context__


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="longdouble is float64 here")
def test_text_for_longdouble():
    kind = np.dtype(np.longdouble).name
    with pytest.raises(attemper.DtypeError) as raised:
        attemper.read(zeros(5, 8, dtype=np.longdouble), zeros(6, 8))
    assert str(raised.value) == (
        f"q has dtype {kind}.\n"
        f"  q  (queries 5, head_dim 8)  {kind} numpy\n"
        "  Attention needs one of float16, bfloat16, float32, float64: cast q first."
    )


@pytest.mark.parametrize(
    "call", [TOO_LARGE, lambda: attemper.read(HUGE, HUGE, backend="reference")], ids=["trace", "read"]
)
def test_text_for_what_does_not_fit(call):
    with pytest.raises(attemper.SizeError) as raised:
        call()
    assert re.fullmatch(
        r"Matrices of 1 × 1048576 × 1048576 scores would take 81920\.0 GiB; \d+\.\d GiB are free\.\n"
        r"  Explicit matrices are for small problems: "
        r"slice the operands, or use attend, which never builds them\.",
        str(raised.value),
    )
    assert isinstance(raised.value, ValueError)


def test_every_raise_has_a_case():
    rooms = ("_arrays", "_attend", "_bounds", "_problem", "_reading", "_scale", "_vitals", "_memory")
    there = set()
    for path in (Path(attemper.__file__).parent / f"{room}.py" for room in rooms):
        raises = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise))
        there |= {(path.name, node.lineno) for node in raises}
    seen = set()
    for call in [*(case[1] for case in CASES), TOO_LARGE]:
        with pytest.raises(attemper.AttemperError) as raised:
            call()
        seen.add((raised.traceback[-1].path.name, raised.traceback[-1].lineno + 1))
    assert there - seen == set()


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = re.findall(r"[├└]── (\w+) +(\w+) +(.+)", _errors.__doc__)
    classes = [c for c in vars(_errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    root, *leaves = classes
    assert root is attemper.AttemperError
    assert re.search(r"^ +AttemperError$", _errors.__doc__, re.MULTILINE)
    for (name, builtin, meaning), leaf in zip(drawn, leaves, strict=True):
        assert leaf.__name__ == name
        assert leaf.__bases__ == (root, getattr(builtins, builtin))
        assert leaf.__doc__ == f"{meaning[0].upper()}{meaning[1:]}."
    for each in classes:
        assert getattr(attemper, each.__name__) is each
        assert each.__name__ in attemper.__all__


def test_the_message_in_the_docstring_is_a_message():
    with pytest.raises(attemper.ShapeError) as raised:
        attemper.read(half(2, 8, 128, 64), half(2, 8, 128, 32))
    assert textwrap.indent(str(raised.value), "    ").replace("numpy", "cuda:0") in _errors.__doc__


def test_no_operand_needs_no_table():
    assert explain("Headline.", "Fix.") == "Headline.\n  Fix."


def test_a_value_is_quoted_in_brief():
    class Rude:
        def __repr__(self):
            raise RuntimeError

    assert brief("x") == "'x'"
    assert brief(np.eye(2)) == "array([[1., 0.], [0., 1.]])"
    assert brief("x" * 200) == "'" + "x" * 78 + "…"
    assert brief(Rude()) == "<Rude>"
    assert brief(10**5000) == "<int>"


@pytest.mark.parametrize(
    "value", [True, False, np.True_, "", "0.5", b"0.5", [], {}, (0.5,), Foreign(), 0.5j, 10**400], ids=brief
)
@pytest.mark.parametrize("name", ["dropout_p", "softcap"])
def test_what_is_not_a_number_is_refused(name, value):
    with pytest.raises(attemper.OptionError, match=rf"^{name} is "):
        attemper.attend(*QKV, **{name: value})


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), ml_dtypes.bfloat16(0.5)], ids=brief
)
@pytest.mark.parametrize("name", ["dropout_p", "softcap", "scale"])
def test_every_kind_of_number_is_a_number(name, number):
    qkv = np.random.default_rng(0).standard_normal((3, 4, 5, 8))
    want = attemper.attend(*qkv, **{name: 0.5}, seed=1).output
    assert (attemper.attend(*qkv, seed=1).output != want).any()
    np.testing.assert_array_equal(attemper.attend(*qkv, **{name: number}, seed=1).output, want)


def test_a_side_beyond_every_key_is_open():
    q, k = np.random.default_rng(0).standard_normal((2, 4, 5, 8))
    for far in (2**62, 2**63 - 1, 10**30):
        for offset in (-(2**61), 0, 2**61):
            seen = attemper.read(q, k, window=(far, far), query_offset=offset).visible_keys
            np.testing.assert_array_equal(seen, 5)


def nonsense(rng, depth=0):
    """Anything that somebody might pass by mistake, and a few things that nobody would."""
    kinds = (np.float32, np.float64, np.float16, np.int64, np.uint64, np.int8, np.bool_, np.complex64, object, "U3")
    kinds += (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "datetime64[s]", [("a", np.float32)])

    def array():
        shape = [rng.choice((0, 1, 2, 4, 5, 6, 8)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))]
        shape = [1] * rng.choice((0, 0, 0, 1, 2)) + shape
        return np.zeros(shape, dtype=rng.choice(kinds)) if rng.random() < 0.7 else np.full(shape, rng.uniform(-9, 9))

    def several():
        return [nonsense(rng, depth + 1) for _ in range(rng.randrange(5))]

    whole = rng.choice((0, 1, 2, 5, 6, 7, -1, -7, 2**31, 2**63, -(2**63), 2**64, 10**400, -(10**5000)))
    makers = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: whole,
        lambda: rng.choice((0.0, 0.5, 1.0, -0.1, 1e-320, 1e308, math.nan, math.inf, -math.inf)),
        lambda: rng.choice((1j, Decimal("0.5"), Fraction(1, 2), Ellipsis, NotImplemented, Foreign, Foreign(), len)),
        lambda: rng.choice(("", "all", "auto", "numpy", "dk", "bottom-right", "entropy", "…", "x" * 500)),
        lambda: rng.choice((b"", b"ab", bytearray(b"ab"), memoryview(b"ab"), range(3), iter(()))),
        lambda: rng.choice((np.float32(0.5), np.int64(2), np.True_, np.str_("x"), np.datetime64(0, "s"))),
        array,
        array,
        lambda: np.ma.masked_less(np.zeros(rng.randrange(9)), 0),
        lambda: zeros(rng.choice((1, 5, 6)), rng.choice((4, 6, 8))).view(np.matrix),
        lambda: torch.zeros([rng.choice((1, 2, 4, 5, 6)) for _ in range(rng.randrange(5))]),
    ]
    if depth < 3:
        makers += [
            several,
            several,
            lambda: tuple(several()),
            lambda: {"a": nonsense(rng, depth + 1)},
            lambda: {1, "entropy", None},
            lambda: sorted(rng.sample(range(8), 3)),
        ]
    return rng.choice(makers)()


CALLS = (
    dict(zip("qkv", QKV, strict=True)),
    {"q": zeros(5, 8), "k": zeros(5, 8), "v": zeros(5, 3), "is_causal": True},
    {"q": zeros(4, 5, 8), "k": zeros(2, 6, 8), "v": zeros(2, 6, 8), "enable_gqa": True, "dropout_p": 0.5},
)


@pytest.mark.parametrize("keyword", inspect.signature(attemper.attend).parameters)
def test_nothing_else_escapes(keyword, auto):
    rng = random.Random(keyword)
    signatures = {f: inspect.signature(f).parameters for f in (attemper.attend, attemper.read, attemper.trace)}
    functions = [f for f, taken in signatures.items() if keyword in taken]
    refusals = set()
    for _ in range(2000):
        function, value = rng.choice(functions), nonsense(rng)
        call = {name: x for name, x in rng.choice(CALLS).items() if name in signatures[function]}
        try:
            function(**{**call, keyword: value})
        except attemper.AttemperError as error:
            refusals.add(str(error))
        except Exception as error:
            raise AssertionError(f"{function.__name__}({keyword}={brief(value)}): {brief(error)}") from error
    assert refusals
    assert all(re.fullmatch(r"\S[^\n]*\.(\n  [^\n]*\S)*\n  \S[^\n]*\.", text) for text in refusals)


@pytest.mark.parametrize("argument", ["rule", "head_dim", "model_dim", "keys"])
def test_nothing_else_escapes_from_scale_for(argument):
    rng = random.Random(argument)
    for _ in range(2000):
        value = nonsense(rng)
        try:
            attemper.scale_for(**{"rule": "log_n", "head_dim": 64, "keys": 10, argument: value})
        except attemper.AttemperError:
            pass
        except Exception as error:
            raise AssertionError(f"{argument}={brief(value)}: {brief(error)}") from error


def test_any_name_may_be_unknown():
    for given in (None, 3, "", "x" * 10**4, np.zeros(3), ["all"]):
        assert str(unknown("word", given, ("all",))) == f"word {brief(given)} is not known.\n  Choose from 'all'."


@pytest.mark.parametrize("function", [attemper.attend, attemper.read, attemper.trace], ids=lambda f: f.__name__)
def test_a_refused_call_leaves_its_operands_alone(function):
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(x.shape, dtype=np.float32) for name, x in zip("qkv", QKV, strict=True)}
    arrays |= {"attn_mask": rng.standard_normal((5, 6)), "sinks": rng.standard_normal(4), "scale": rng.random(4)}
    arrays |= {"key_lengths": np.array([6, 3]), "query_offset": np.array([0, 1])}
    if function is attemper.read:
        del arrays["v"]
    wrong = {
        "q": zeros(2, 4, 5, 7),
        "k": zeros(2, 3, 6, 8),
        "attn_mask": np.full((5, 7), -np.inf),
        "sinks": zeros(5),
        "scale": np.full(4, np.nan),
        "key_lengths": np.array([6, 7]),
        "query_offset": np.array([0.5, 1]),
        "cu_seqlens": np.array([0, 3]),
        "window": [-1, 0],
        "softcap": np.array(-1.0),
        "dropout_p": np.array(2.0),
        "seed": -1,
    }
    for name, value in wrong.items():
        passed = {**arrays, name: value}
        held = {key: x for key, x in passed.items() if isinstance(x, np.ndarray)}
        before = {key: (x.shape, x.strides, x.dtype, x.tobytes()) for key, x in held.items()}
        with pytest.raises(attemper.AttemperError):
            function(**passed)
        assert {key: (x.shape, x.strides, x.dtype, x.tobytes()) for key, x in held.items()} == before
