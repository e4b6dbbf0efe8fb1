"""A function of the user's that returns a model: package.module:factory."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._errors import OptionError, brief, explain
from ._hugging_face import first_line
from ._inputs import with_inputs
from ._target import Loaded, Wanted


def from_factory(torch: Any, target: str, wanted: Wanted, device: str | None, dtype: str) -> Loaded:
    made = _call(target)
    parts = made if isinstance(made, tuple) and made and isinstance(made[0], torch.nn.Module) else (made,)
    model, inputs, loss = (*parts, None, None)[:3]
    if len(parts) > 3 or not isinstance(model, torch.nn.Module):
        fix = "Return a torch module, (model, inputs), or (model, inputs, loss)."
        shown = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"{type(made).__name__} {brief(made)}"
        raise OptionError(explain(f"{target} returned {shown}.", fix))
    if loss is not None and not callable(loss):
        fix = "Let loss be a function from the model's output to a scalar, or leave it out."
        raise OptionError(explain(f"{target} returned {type(loss).__name__} {brief(loss)} as its loss.", fix))
    number = None if dtype == "auto" else getattr(torch, dtype)
    if device is not None or number is not None:
        model.to(device=device, dtype=number)
    if inputs is None:
        transformers = sys.modules.get("transformers")
        if transformers is None or not isinstance(model, transformers.PreTrainedModel):
            fix = "Return (model, inputs): a tensor, a tuple of them, or a dict of keywords."
            raise OptionError(explain(f"{target} returned a {type(model).__name__} and nothing to run it on.", fix))
        loaded = with_inputs(torch, model, None, wanted, ())
        return replace(loaded, name=target, loss=loss)
    if wanted != Wanted():
        fix = "Leave --text, --tokens and --sequences out."
        raise OptionError(explain(f"{target} brings its own inputs.", fix))
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, torch.Tensor):
        args = (inputs,)
    elif isinstance(inputs, tuple):
        args = inputs
    elif isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        kwargs = dict(inputs)
    else:
        fix = "Let inputs be a tensor, a tuple of them, or a dict of keywords."
        raise OptionError(explain(f"{target} returned {type(inputs).__name__} {brief(inputs)} as its inputs.", fix))

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device=device, dtype=number if x.is_floating_point() else None)

    args = tuple(moved(x) for x in args)
    kwargs = {key: moved(x) for key, x in kwargs.items()}
    return Loaded(name=target, model=model, args=args, kwargs=kwargs, loss=loss)


def _call(target: str) -> Any:
    """What the factory returns; its module is looked for in the current directory too."""
    module_name, _, path = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script starts with its own directory there instead
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            fix = "Run in the directory that holds it, or install it."
            raise OptionError(explain(f"There is no module {missing}.", fix)) from None
        raise OptionError(
            explain(
                f"{module_name} imports {missing}, which is not installed.", f"pip install {missing.partition('.')[0]}"
            )
        ) from error
    except (Exception, SystemExit) as error:  # a script that ends itself must not end us, with a status of its own
        raise OptionError(
            explain(f"Importing {module_name} raised {type(error).__name__}.", first_line(str(error)))
        ) from error
    factory: Any = module
    for name in path.split("."):
        if not hasattr(factory, name):
            public = [key for key, value in vars(factory).items() if callable(value) and not key.startswith("_")]
            near = difflib.get_close_matches(name, public, n=1, cutoff=0.5)
            fix = f"Did you mean {module_name}:{near[0]}?" if near else "Name a function in it that returns a model."
            raise OptionError(explain(f"{module_name} has no {path}.", fix))
        factory = getattr(factory, name)
    if not callable(factory):
        fix = "Name a function without arguments that returns a model."
        raise OptionError(explain(f"{target} is {type(factory).__name__} {brief(factory)}, not a function.", fix))
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise OptionError(explain(f"{target}() raised {type(error).__name__}.", first_line(str(error)))) from error
