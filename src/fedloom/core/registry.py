"""Registry: finds methods by file name. A new file in `fedloom/methods` needs no entry anywhere."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedloom._system import import_file
from fedloom.core.method import Method, Plugin, composed, require_dataclass
from fedloom.core.settings import check_setting
from fedloom.errors import ConfigError, unknown

Class = type[Method] | type[Plugin]
# Classes without a file of their own, as a notebook defines them, by name. See `name_of`.
_DEFINED: dict[str, Class] = {}


def method_names() -> dict[str, str]:
    """Returns {name: module} of all methods of fedloom. Files "_name.py" are not methods."""
    methods = importlib.import_module("fedloom.methods")
    modules = [m.name for m in pkgutil.iter_modules(methods.__path__)]
    return dict(sorted((_shown(name), name) for name in modules if not name.startswith("_")))


def _shown(module: str) -> str:
    return module.replace("_plus", "+").replace("_", "-")


def method_class(
    name: str, settings: Mapping[str, Any] = types.MappingProxyType({})
) -> type[Method]:
    """Returns the class of a method.

    Args:
        name: The name of its file ("fedavg"), a user's own file ("path/to/mine.py"), or the name
            of a class that was given as an object before (see `name_of`).
        settings: The settings of the method. A plug-in's `base` is among them.
    """
    return with_base(_DEFINED.get(name) or _class_in_file(name), settings)


def with_base(found: Class, settings: Mapping[str, Any]) -> type[Method]:
    """Returns the class that runs: the method's own, or that of a plug-in and its base.

    Args:
        found: The class of a method or a plug-in.
        settings: Its settings. A plug-in's `base` is among them.
    """
    require_dataclass(found)
    if issubclass(found, Method):
        return found
    (base,) = (f for f in fields(found) if f.name == "base")
    after = check_setting(base, settings.get("base", base.default), "method")
    return composed(found, method_class(after), after)


def _class_in_file(name: str) -> Class:
    if name.endswith(".py"):
        module = import_file(Path(name), "method")
    else:
        known = method_names()
        if name.lower() not in known:
            raise unknown("method", name, known)
        module = importlib.import_module(f"fedloom.methods.{known[name.lower()]}")
    own = _classes_of(module)
    if len(own) != 1:
        raise ConfigError(
            f"method: {name} must define exactly one subclass of Method or Plugin, found {len(own)}"
        )
    return own[0]


def _classes_of(module: types.ModuleType) -> list[Class]:
    """Returns the methods and plug-ins that a module or package defines."""
    defined = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and f"{c.__module__}.".startswith(f"{module.__name__}.")
    ]
    return [c for c in defined if issubclass(c, (Method, Plugin))]


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    """Returns a method with the given settings.

    Raises a ConfigError if a setting does not exist. It names the nearest one and all valid ones.
    """
    return with_settings(method_class(name, settings), name, settings)


def with_settings(cls: type[Method], name: str, settings: Mapping[str, Any]) -> Method:
    """Returns a method of a class with the given settings. It raises the errors of `make_method`.

    Args:
        cls: The class that runs.
        name: The method's name, for errors.
        settings: Its settings.
    """
    valid = [f.name for f in fields(cls)]
    for key in settings:
        if key not in valid:
            raise unknown(f"setting of method {name!r}:", key, valid)
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(
            f"method {name!r}: its class {cls.__name__} does not define {', '.join(missing)}"
        )
    return cls(**settings)


def name_of(cls: Class) -> str:
    """Returns the name of a method's class, by which `method_class` finds it.

    It is the name of a method of fedloom, or the path of the user's own file. A class without a
    file of its own, in a notebook, a script, or a file with several methods, has the name of the
    class. `method_class` finds it as long as this process lives, the last one of that name.
    """
    for name, file in method_names().items():
        if f"{cls.__module__}.".startswith(f"fedloom.methods.{file}."):
            return name
    module = sys.modules.get(cls.__module__)
    path = getattr(module, "__file__", None)
    if module is not None and path and cls.__module__ != "__main__":
        own = _classes_of(module)
        if own == [cls] or (
            len(own) == 1 and issubclass(own[0], Plugin) and issubclass(cls, own[0])
        ):
            return str(Path(path).resolve())
    name = f"own-{cls.__name__}" if cls.__name__.lower() in method_names() else cls.__name__
    _DEFINED[name] = cls
    return name


def file_or_name(cls: Class) -> str:
    """Returns the name of a method's class, by which any process finds it.

    Raises a ConfigError if the class has no file of its own.
    """
    name = name_of(cls)
    if name in _DEFINED:
        raise ConfigError(
            f"method {name!r}: other processes look for it by its file; put the class, and no "
            "other method, into a file of its own"
        )
    return name
