"""The command line: what a user can do, one function per command. Errors of input are one line and exit code 2, Ctrl-C is 130."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import getdoc, getmodule
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedloom import show as tables
from fedloom.data.datasets import catalogue, find
from fedloom.data.holdings import holdings, plot_holdings
from fedloom.data.partition import partitions
from fedloom.data.split import clients_without_training
from fedloom.errors import ConfigError, FedloomError, unknown
from fedloom.method import Method, method_class, method_names
from fedloom.models import models
from fedloom.recipe import Recipe, make_recipe, override, read_tables
from fedloom.runs import Result, read_run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Federated graph learning.")
# Tables keep their columns when the output is a pipe or a file.
out = Console(width=None if sys.stdout.isatty() else 160, markup=False)
err = Console(stderr=True, markup=False, soft_wrap=True)

Set = Annotated[list[str], typer.Option("--set", help="table.key=value, e.g. method.lr=0.02; may be repeated")]
Text = Annotated[str | None, typer.Option()]
Number = Annotated[int | None, typer.Option()]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on stdout, nothing else there")]


@app.command()
def run(
    recipe: Annotated[Path | None, typer.Argument(help="a TOML file; options and --set override it")] = None,
    method: Text = None, dataset: Text = None, clients: Number = None, partition: Text = None, split: Text = None, model: Text = None,
    rounds: Number = None, seed: Number = None, engine: Text = None, evaluation: Text = None, set_: Set = [],  # noqa: B006
    out_: Annotated[Path | None, typer.Option("--out", help="run folder (default: a new one under runs/)")] = None,
    beside: Annotated[str, typer.Option(help="methods to run on the same federation for comparison, e.g. local,central")] = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Run a method on a federation and keep everything in a run folder."""
    given = {
        "method.name": method, "method.rounds": rounds, "data.dataset": dataset, "data.split": split, "model.name": model,
        "partition.name": partition, "partition.clients": clients, "run.seed": seed, "run.engine": engine, "run.evaluation": evaluation,
    }  # fmt: skip
    tables_ = read_tables(recipe) if recipe else {}
    flags = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    base = override(tables_, [*flags, *set_])
    chosen = make_recipe(base)
    others = [make_recipe(_as_baseline(base, name)) for name in beside.replace(" ", "").split(",") if name]
    err.print(f"loading {chosen.data.dataset}, {chosen.partition.clients} clients by {chosen.partition.name}", style="dim")
    federation = chosen.federation()
    for recipe_ in (chosen, *others):
        recipe_.check(federation)
    if idle := clients_without_training(federation):
        err.print(f"no training item at client {', '.join(idle)}: takes part, its loss is 0", style="yellow")
    result = _with_progress(chosen, lambda step: chosen.carry_out(_fresh_folder(chosen, out_), step, federation=federation))
    compared = [_with_progress(other, lambda step, o=other: o.carry_out(None, step, federation=federation)) for other in others]  # type: ignore[misc]
    _print(result, as_json, compared)


def _as_baseline(base: dict[str, Any], name: str) -> dict[str, Any]:
    """The same recipe for another method, with as much training; learning rates and optimisers are each method's own."""
    shared = {f.name for f in fields(method_class(name))} & {"rounds", "epochs", "batch_size", "weight_decay"}
    kept = {key: value for key, value in base.get("method", {}).items() if key in shared}
    return {**base, "method": {"name": name, **kept}, "run": {**base.get("run", {}), "evaluation": ""}}


@app.command()
def resume(folder: Annotated[Path, typer.Argument(help="a run folder with a checkpoint")], as_json: AsJson = False) -> None:
    """Go on with a run that was stopped; the result is the same, to the bit, as if it had not been."""
    config = read_run(folder).summary["config"]
    if "partition" not in config:
        raise ConfigError(f"{folder} was made from Python with a federation of its own: fedloom.run(..., out=folder, resume=True) there")
    recipe = make_recipe(config)
    _print(_with_progress(recipe, lambda step: recipe.carry_out(folder, step, resume=True)), as_json)


@app.command()
def show(folder: Annotated[Path, typer.Argument(help="a run folder")], as_json: AsJson = False) -> None:
    """Print a run's result again."""
    _print(read_run(folder), as_json)


@app.command("methods")
def list_methods(name: Annotated[str | None, typer.Argument(help="show this one in full")] = None) -> None:
    """What methods there are; with a name: its paper, equations, what travels, settings."""
    if name:
        out.print(tables.method(name, method_class(name)))
    else:
        out.print(tables.listing({n: _first_line(method_class(n)) for n in method_names()}))


def _first_line(cls: type[Method]) -> str:
    return (getdoc(getmodule(cls)) or "").partition("\n")[0].partition(": ")[2]


@app.command("datasets")
def list_datasets() -> None:
    """What datasets there are by name, and which are on this machine."""
    out.print(tables.datasets(catalogue(), [name for name in catalogue() if find(name).kind != "download"]))


@app.command("partitions")
def list_partitions() -> None:
    """Ways to divide a graph over clients."""
    out.print(tables.listing(partitions()))


@app.command("models")
def list_models() -> None:
    """Model architectures."""
    out.print(tables.listing(models()))
    out.print("\nname-LAYERSxWIDTH, e.g. gcn-4x128; several, separated by commas, are dealt over the clients", style="dim")


@app.command()
def partition(
    dataset: str = "cora", clients: int = 10, partition: str = "louvain", seed: int = 0, split: Text = None, set_: Set = [],  # noqa: B006
    plot: Annotated[Path | None, typer.Option(help="write a picture: .png, .svg or .pdf")] = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Divide a graph and show who holds what."""
    given = {"data.dataset": dataset, "partition.name": partition, "partition.clients": clients, "run.seed": seed, "data.split": split}
    flags = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    federation = make_recipe(override({}, [*flags, *set_])).federation()
    held = holdings(federation)
    if plot:
        plot_holdings(federation, plot)
        err.print(f"wrote {plot}", style="dim")
    if as_json:
        print(json.dumps(held))
    else:
        out.print(tables.holdings(held))


def _fresh_folder(recipe: Recipe, asked: Path | None) -> Path:
    if asked is not None:
        return asked
    parts = (Path(recipe.data.dataset).name, f"{recipe.partition.name}{recipe.partition.clients}", Path(recipe.method).stem)
    name = "-".join((*parts, recipe.model.name, f"s{recipe.run.seed}")).replace(",", "_").replace(":", "_").replace("=", "_")
    count = 1
    while (folder := Path("runs") / (name if count == 1 else f"{name}.{count}")).exists():
        count += 1
    return folder


def _with_progress(recipe: Recipe, work: Callable[[Callable[[dict[str, Any], int], None]], Result]) -> Result:
    """A bar on a terminal; in a pipe or a log a line for every tenth of the rounds."""
    clock = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *clock, TextColumn("{task.fields[score]}"))
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task(recipe.method, total=None, score="")
        last = ""

        def step(entry: dict[str, Any], planned: int) -> None:
            nonlocal last
            last = f"val {tables.percent(entry['val_accuracy'])}" if "val_accuracy" in entry else last
            bar.update(task, completed=entry["round"], total=planned, score=last)
            done = entry["round"]
            if (
                not err.is_terminal
                and entry.get("stage") != "finetune"
                and done * 10 // max(planned, 1) > (done - 1) * 10 // max(planned, 1)
            ):
                err.print(f"{recipe.method}: round {done} of {planned}, {last}", style="dim", highlight=False)

        return work(step)


def _print(result: Result, as_json: bool, compared: list[Result] | None = None) -> None:
    summary = result.summary
    if as_json:
        shown = {**summary, **({"beside": {r.summary["method"]: r.summary for r in compared}} if compared else {})}
        print(json.dumps(shown))
    else:
        out.print(tables.result(summary, [r.summary for r in compared or []]))
    if result.folder:
        err.print(f"run folder: {result.folder}", style="dim")


def main() -> None:
    """Entry point of `fedloom`: every error of input is one line on stderr and exit code 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        sys.exit(app(standalone_mode=False))  # 130 after Ctrl-C
    except click.exceptions.Abort:
        sys.exit(130)
    except click.UsageError as error:
        commands = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
        _fail(unknown("command", sys.argv[1], commands) if "No such command" in error.message else error.format_message())
    except FedloomError as error:
        _fail(error)
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}")


def _fail(reason: object) -> NoReturn:
    print(f"fedloom: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(2)
