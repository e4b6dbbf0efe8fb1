"""How often kernels are compiled where lengths change: Triton says what it would compile, and nothing is run."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COUNT = """
import json
from collections import Counter, defaultdict
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from attemper import attend
from attemper._backends import cuda
from attemper._backends._operator import call_of, empty_output
from attemper._backends.cuda import _form, _launch, _launch_backward, _moments, _ready
from attemper._problem import pose

backend = make_backend(GPUTarget("cuda", 90, 32))
binders, versions, asked = {}, defaultdict(set), Counter()

def version_of(kernel, arguments):
    if kernel not in binders:
        binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
    return str(binders[kernel](*arguments)[1])

class Compiled(CompiledKernel):
    def __init__(self, kernel, version):
        self.kernel, self.version = kernel, version

    def __del__(self):
        pass

    def __getitem__(self, grid):
        def launch(*arguments):
            assert version_of(self.kernel, arguments) == self.version, self.kernel
        return launch

def run(kernel, *arguments, grid, warmup, **options):
    asked[kernel.__name__] += 1
    version = version_of(kernel, arguments)
    versions[kernel.__name__].add((version, str(options)))
    return Compiled(kernel, version)

JITFunction.run = run
cuda.unsupported = lambda problem: None
_form.gluon = lambda name: None
_launch.splits_for = lambda programs, keys, tile, device: max(1, keys // 512) if tile == 128 else 1

def blank(*shape):
    return torch.empty(*shape, 64, dtype=torch.bfloat16)

def train(batch, length, causal, **options):
    q, k = blank(batch, 8, length).requires_grad_(), blank(batch, 4, length)
    attended = attend(q, k, k, backend="cuda", is_causal=causal, enable_gqa=True, **options)
    torch.autograd.grad(attended.output, q, torch.empty_like(q))

def train_padded(batch, length, causal):
    train(batch, length, causal, key_lengths=torch.arange(batch) + 90, dropout_p=0.1)

def decode(batch, length, causal):
    q, k = blank(batch, 8, 1), blank(batch, 4, length)
    attend(q, k, k, backend="cuda", is_causal=causal, query_offset="bottom-right", enable_gqa=True)

def beside_hopper(batch, length, causal):
    q, k = blank(batch, 8, length), blank(batch, 4, length)
    problem = pose(q, k, k, is_causal=causal, enable_gqa=True)
    call = call_of(problem, problem.batch, banded=True)
    rows, marks = torch.empty(q.shape[:-1]), torch.empty(q.numel() // 64, dtype=torch.int32)
    _launch._after_hopper(call, 2, empty_output(call, q.dtype), None, _launch._fields(call, {}), marks, opening=True)
    _moments.fill(call, dict.fromkeys(("logsumexp", "score_mean", "score_std", "first_key_weight"), rows), marks, 64)
    _launch_backward._dots(call, q, q, rows)
    _launch_backward._flow(call, _launch_backward.Saved(*[rows] * 7), q, rows, rows)

for case in (train, train_padded, decode, beside_hopper):
    for causal in (True, False):
        versions.clear(), asked.clear(), _ready._COMPILED.clear(), _launch._PLANS.clear()
        for batch in (1, 3, 16, 32):
            for length in (129, 160, 250, 512, 777, 1000, 1024, 2047, 2048, 3000, 4096):
                case(batch, length, causal)
        found = {name: (len(seen), asked[name]) for name, seen in versions.items()}
        print(json.dumps([case.__name__, causal, found]))
"""


@pytest.fixture(scope="module")
def counts():
    """How many versions of each kernel there are, and how often Triton was asked for one."""
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COUNT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {(case, causal): found for case, causal, found in map(json.loads, done.stdout.splitlines())}


def versions(counts, case, *, causal):
    found = counts[case, causal]
    # A kernel that was compiled is found again.
    assert all(versions == asked for versions, asked in found.values()), found
    return {name: versions for name, (versions, _) in found.items()}


GRADIENTS = ("pull_kernel", "to_queries_kernel", "to_keys_kernel")


def test_under_a_causal_mask(counts):
    """One forward pass for all lengths, but for whether keys are split; gradients by whether 16 divides the length."""
    assert versions(counts, "train", causal=True) == {
        "forward_kernel": 1,
        "careful_kernel": 1,
        **dict.fromkeys(GRADIENTS, 2),
    }
    assert versions(counts, "decode", causal=True) == {"forward_kernel": 2, "merge_kernel": 1, "careful_kernel": 1}


def test_where_all_is_seen(counts):
    """The forward pass too by whether 16 divides the length."""
    assert versions(counts, "train", causal=False) == {
        "forward_kernel": 2,
        "careful_kernel": 1,
        **dict.fromkeys(GRADIENTS, 2),
    }
    assert versions(counts, "decode", causal=False) == {"forward_kernel": 4, "merge_kernel": 2, "careful_kernel": 1}


@pytest.mark.parametrize("causal", [True, False])
def test_beside_the_kernel_for_hopper(counts, causal):
    assert versions(counts, "beside_hopper", causal=causal) == {
        "opening_kernel": 1,
        "careful_kernel": 1,
        "chunk_kernel": 2,
        "before_kernel": 1,
        "moments_kernel": 1,
        "dots_kernel": 1,
        "flow_kernel": 2,
    }


@pytest.mark.parametrize("causal", [True, False])
def test_with_key_lengths_and_dropout(counts, causal):
    """By whether a batch has one entry too."""
    assert versions(counts, "train_padded", causal=causal) == {
        "forward_kernel": 2,
        "careful_kernel": 2,
        "pull_kernel": 3,
        "to_queries_kernel": 4,
        "to_keys_kernel": 4,
    }
