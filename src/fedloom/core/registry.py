"""Registry: finds methods by file name. A new file in `fedloom/methods` needs no entry anywhere."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedloom._system import import_file
from fedloom.core.method import Method, Plugin, composed
from fedloom.core.settings import check_setting
from fedloom.errors import ConfigError, unknown


def method_names() -> dict[str, str]:
    """Returns {name: module} of all methods of fedloom. Files "_name.py" are not methods."""
    methods = importlib.import_module("fedloom.methods")
    return {
        _shown(m.name): m.name
        for m in pkgutil.iter_modules(methods.__path__)
        if not m.name.startswith("_")
    }


def _shown(module: str) -> str:
    return module.replace("_plus", "+").replace("_", "-")


def method_class(
    name: str, settings: Mapping[str, Any] = types.MappingProxyType({})
) -> type[Method]:
    """Returns the class of a method.

    Args:
        name: The name of its file ("fedavg"), or a user's own file ("path/to/mine.py").
        settings: The settings of the method. A plug-in's `base` is among them.
    """
    if name.endswith(".py"):
        module = import_file(Path(name), "method")
    else:
        known = method_names()
        if name.lower() not in known:
            raise unknown("method", name, known)
        module = importlib.import_module(f"fedloom.methods.{known[name.lower()]}")
    defined = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and f"{c.__module__}.".startswith(f"{module.__name__}.")
    ]
    own = [c for c in defined if issubclass(c, (Method, Plugin))]
    if len(own) != 1:
        raise ConfigError(
            f"method: {name} must define exactly one subclass of Method or Plugin, found {len(own)}"
        )
    (found,) = own
    if issubclass(found, Method):
        return found
    (base,) = (f for f in fields(found) if f.name == "base")
    after = check_setting(base, settings.get("base", base.default), "method")
    return composed(found, method_class(after), after)


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    """Returns a method with the given settings.

    Raises a ConfigError if a setting does not exist. It names the nearest one and all valid ones.
    """
    cls = method_class(name, settings)
    valid = [f.name for f in fields(cls)]
    for key in settings:
        if key not in valid:
            raise unknown(f"setting of method {name!r}:", key, valid)
    return cls(**settings)


def name_of(method: Method) -> str:
    """Returns the name of a method, or the path of a user's own file."""
    module = type(method).__module__
    for name, file in method_names().items():
        if f"{module}.".startswith(f"fedloom.methods.{file}."):
            return name
    return str(Path(inspect.getfile(type(method))).resolve())
