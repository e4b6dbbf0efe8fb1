"""From a function that Numba understands to an object file: typed and lowered by Numba, optimised once, as a whole.

Left to itself Numba makes machine code for each of the fifty functions that a kernel is written in, and again for every
one that calls it. Here they are parts, which are only linked into each other; LLVM then sees the whole kernel, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import llvmlite.binding as llvm
from numba import njit, types
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering
from numba.extending import overload

from ._code import ENTRY
from ._target import target_machine


def _part_of(library_class: Any) -> Any:
    class Part(library_class):  # type: ignore[misc]
        """Code that is only ever linked into other code, and optimised there."""

        def _optimize_functions(self, ll_module: Any) -> None:
            ll_module.data_layout = self._codegen._data_layout  # noqa: SLF001

        def finalize(self) -> None:
            for library in dict.fromkeys(self._linking_libraries):
                self._reload_init.update(library._reload_init)  # noqa: SLF001
                self._final_module.link_in(library._get_module_for_linking(), preserve=True)  # noqa: SLF001
            self._finalized = True

    return Part


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerPart(NativeLowering):  # type: ignore[misc]
    _name = "attemper_lower_part"

    def run_pass(self, state: Any) -> bool:
        codegen = state.targetctx.codegen()
        state.library = _part_of(codegen._library_class)(codegen, state.func_id.func_qualname)  # noqa: SLF001
        state.flags.no_compile = True
        super().run_pass(state)
        # Numba tells functions apart by the entry of their machine code, a built-in function: any that is its own.
        own: list[None] = []
        entry = own.append
        state.targetctx.insert_user_function(entry, state["cr"].fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=entry)
        return True


class _PartCompiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> Any:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [(_LowerPart if step is NativeLowering else step, why) for step, why in pipeline.passes]
        pipeline.finalize()
        return [pipeline]


OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "no_cpython_wrapper": True,
    "no_rewrites": True,
    "pipeline_class": _PartCompiler,
}
"""Of every function in a kernel: they take and return no Python objects and cannot raise."""


def kernel(function: Callable[..., Any]) -> Any:
    """The decorator of the functions in a kernel."""
    return njit(**OPTIONS)(function)


def by_kind(stub: Callable[..., Any]) -> Callable[..., Any]:
    """Choose what a function is by the kinds of its arguments: Numba's overload, which wants no annotations."""

    def register(choose: Callable[..., Any]) -> Callable[..., Any]:
        choose.__annotations__.clear()

        @wraps(choose)
        def chosen(*kinds: Any) -> Any:
            function = choose(*kinds)
            function.__annotations__.clear()
            return function

        overload(stub, jit_options=OPTIONS)(chosen)
        return choose

    return register


def object_code(function: Any) -> bytes:
    """The object file of a kernel, which has ENTRY and nothing else to call."""
    function.compile((types.int64,))
    compiled = function.overloads[(types.int64,)]
    compiled.library.finalize()
    text = compiled.library.get_llvm_str()
    name = compiled.fndesc.llvm_func_name
    module = llvm.parse_assembly(text)
    # Numba's functions return a status, through two pointers more; a kernel has nothing to report.
    module.link_in(
        llvm.parse_assembly(f"""
            declare i32 @"{name}"(ptr, ptr, i64)
            define void @{ENTRY}(i64 %address) {{
                %result = alloca ptr
                %error = alloca ptr
                %status = call i32 @"{name}"(ptr %result, ptr %error, i64 %address)
                ret void
            }}""")
    )
    for part in module.functions:
        if not part.is_declaration and part.name != ENTRY:
            part.linkage = "internal"
    machine = target_machine()
    module.triple, module.data_layout = llvm.get_process_triple(), str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    missing = [f.name for f in module.functions if f.is_declaration and re.match(r"(_ZN|numba|NRT|Py|_Py)", f.name)]
    if missing:
        raise AssertionError(f"the kernel needs Python: {missing}")
    code: bytes = machine.emit_object(module)
    return code
