"""The data of a run that is read from its folder: loaded and divided again, as the first time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.core.registry import make_method
from fedloom.data.federation import Federation
from fedloom.errors import ConfigError, DataError
from fedloom.experiments.recipe import make_recipe

TABLES = ("data", "partition", "model", "method", "run")


def federation_of(config: Mapping[str, Any]) -> Federation:
    """Returns the federation of a run.

    config: the run's origin, as config.json keeps it.

    Raises a DataError if the config is not a recipe: the federation was given from Python, or by
    the parties of a deployment.
    """
    if "partition" not in config or "deployment" in config:
        raise DataError(
            "the federation of this run was given from Python, or by parties; "
            "it cannot be made again from config.json"
        )
    try:
        recipe = make_recipe({name: config[name] for name in TABLES if name in config})
        method = make_method(recipe.method, recipe.method_settings)
    except ConfigError as error:
        raise DataError(f"config.json cannot be used any more ({error})") from error
    divided = recipe.federation()
    return (divided.merged() if method.centralized else divided).check()
