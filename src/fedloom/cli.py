"""What a user can type. Errors of input are a line on stderr and exit code 2; a failed round 1, Ctrl-C 130, SIGTERM 143."""

from __future__ import annotations

import atexit
import gc
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer

from fedloom._system import graceful_signals
from fedloom.errors import FedloomError, RoundFailed, unknown

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Federated graph learning.",
)


def option(help: str, *names: str) -> Any:
    """A command's option with its help text."""
    return typer.Option(*names, help=help)


RecipeFile = Annotated[
    Path | None, typer.Argument(help="a TOML file; options and --set override it")
]
MethodName = Annotated[
    str | None, option("a name (`fedloom methods`) or a file of your own (default: fedavg)")
]
Dataset = Annotated[
    str | None,
    option(
        "a name (`fedloom datasets`), a folder of tables, or synthetic:key=value,... (default: cora)"
    ),
]
Clients = Annotated[int | None, option("number of clients (default: 10)")]
Partition = Annotated[
    str | None, option("how the graph is divided (`fedloom partitions`) (default: louvain)")
]
Split = Annotated[
    str | None,
    option('"20/40/40", "global 10/10/80" or "public" (default: the dataset\'s usual one)'),
]
Model = Annotated[
    str | None,
    option("e.g. gcn, gcn-4x128, or several dealt over the clients: gcn,gat,sage (default: gcn)"),
]
Rounds = Annotated[int | None, option("communication rounds (default: 100)")]
Engine = Annotated[
    str | None,
    option("how phases get run: loop, stacked, wire, processes, ray or flower (default: loop)"),
]
Secure = Annotated[
    bool, option("the server gets masked sums of the clients' replies and nothing else")
]
Evaluation = Annotated[
    str | None,
    option("whose model is scored: local, global or common (default: the method's first)"),
]
Seed = Annotated[int | None, option("root of every random stream (default: 0)")]
Set = Annotated[list[str], option("table.key=value, e.g. method.lr=0.02; may be repeated", "--set")]
AsJson = Annotated[bool, option("one JSON object on stdout, nothing else there", "--json")]
TrackBy = Annotated[
    str,
    option(
        "tensorboard, mlflow or both; NAME+clients: each client too; NAME:WHERE: a folder or URI"
    ),
]
Agreement = Annotated[Path, typer.Argument(help="the TOML file that all parties have agreed on")]
Insecure = Annotated[bool, option("without TLS: on this machine only")]
Folder = Annotated[Path, typer.Argument(help="a run folder")]


def _commands() -> Any:
    from fedloom import (
        commands,  # imports torch: only now, so that --help and typing errors answer at once
    )

    return commands


def _given(
    method: str | None, dataset: str | None, clients: int | None, partition: str | None, split: str | None, model: str | None,
    rounds: int | None, seed: int | None, engine: str | None, secure: bool, evaluation: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Options as settings of a recipe, None where the user said nothing."""
    return {
        "method.name": method, "method.rounds": rounds, "data.dataset": dataset, "data.split": split, "model.name": model,
        "partition.name": partition, "partition.clients": clients, "run.seed": seed, "run.engine": engine, "run.evaluation": evaluation,
        "run.secure": secure or None,
    }  # fmt: skip


@app.command()
def run(
    recipe: RecipeFile = None, method: MethodName = None, dataset: Dataset = None, clients: Clients = None,
    partition: Partition = None, split: Split = None, model: Model = None, rounds: Rounds = None, seed: Seed = None,
    engine: Engine = None, secure: Secure = False, evaluation: Evaluation = None, set_: Set = [],  # noqa: B006
    out: Annotated[Path | None, option("run folder (default: a new one under runs/)")] = None,
    baselines: Annotated[str, option("methods to run on the same federation for comparison, e.g. local,central")] = "",
    track: TrackBy = "", as_json: AsJson = False,
) -> None:  # fmt: skip
    """Run a method on a federation and keep everything in a run folder.

    RECIPE is a TOML file; options and --set override what it says.
    """
    given = _given(
        method, dataset, clients, partition, split, model, rounds, seed, engine, secure, evaluation
    )
    _commands().run(recipe, given, set_, out, baselines, as_json, track)


@app.command()
def resume(folder: Folder, track: TrackBy = "", as_json: AsJson = False) -> None:
    """Go on with a run that was stopped or killed; the result is the same, to the bit, as if it had not been."""
    _commands().resume(folder, as_json, track)


@app.command()
def show(folder: Folder, as_json: AsJson = False) -> None:
    """Print a run's result again."""
    _commands().show(folder, as_json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="show this one in full")] = None,
) -> None:
    """What methods there are; with a name: its paper, equations, what travels, settings."""
    _commands().list_methods(name)


@app.command()
def datasets() -> None:
    """What datasets there are by name, and which are on this machine."""
    _commands().list_datasets()


@app.command()
def partitions() -> None:
    """Ways to divide a graph over clients."""
    _commands().list_partitions()


@app.command()
def models() -> None:
    """Model architectures."""
    _commands().list_models()


@app.command()
def partition(
    dataset: Dataset = None, clients: Clients = None, partition: Partition = None, split: Split = None, seed: Seed = None,
    set_: Set = [],  # noqa: B006
    plot: Annotated[Path | None, option("write a picture: .png, .svg or .pdf")] = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Divide a graph and show who holds what."""
    given = {
        "data.dataset": dataset,
        "partition.name": partition,
        "partition.clients": clients,
        "run.seed": seed,
        "data.split": split,
    }
    _commands().partition(given, set_, plot, as_json)


@app.command()
def keys(
    host: Annotated[
        str | None,
        typer.Argument(help="DNS name or IP address under which parties reach the coordinator"),
    ] = None,
    party: Annotated[list[str], option("make keys for a party of this name; may be repeated")] = [],  # noqa: B006
    out: Annotated[Path, option("folder for the files; none there is written over")] = Path("keys"),
) -> None:
    """Make the keys of a deployment: the coordinator's certificates, and a pair for each party.

    HOST is the DNS name or IP address under which parties reach the coordinator; without it only parties' keys are made.
    """
    _commands().keys(host, party, out)


@app.command()
def serve(
    agreement: Agreement,
    keys: Annotated[Path, option("folder with coordinator.key, server.crt and server.key")] = Path("keys"),
    out: Annotated[Path | None, option("run folder (default: a new one under runs/)")] = None,
    wait: Annotated[float, option("seconds that parties have to come in; after that a quorum is enough")] = 600.0,
    insecure: Insecure = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Coordinate a federation: wait for the parties of an agreement, then run its method with them (docs/deploy.md)."""
    _commands().serve(agreement, keys, out, wait, insecure, as_json)


@app.command()
def join(
    agreement: Agreement,
    party: Annotated[str, option("this party's name in the agreement")],
    key: Annotated[Path, option("this party's NAME.key")],
    data: Annotated[
        Path, option("this party's graph: a folder of tables, a .safetensors file, or PyG's .pt")
    ],
    state: Annotated[
        Path | None, option("folder for the party's own states and model (default: fedloom-NAME)")
    ] = None,
    patience: Annotated[
        float, option("seconds to wait for a coordinator that is not there")
    ] = 3600.0,
    tell_errors: Annotated[
        bool,
        option("tell the coordinator the words of every error; values of the graph may be in them"),
    ] = False,
    socket: Annotated[
        Path | None, option("take orders from Flower's own SuperNode, at this Unix socket")
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Take part in a federation with a graph of one's own, which stays here (docs/deploy.md)."""
    _commands().join(agreement, party, key, data, state, patience, tell_errors, socket, insecure)


@app.command()
def compare(
    grid: Annotated[
        Path | None, typer.Argument(help="a TOML file with a table [compare]; options override it")
    ] = None,
    methods: Annotated[
        str | None, option("names or files with commas in between; local is always among them")
    ] = None,
    dataset: Annotated[
        str | None,
        option("one or several, with commas in between (default: cora)", "--dataset", "--datasets"),
    ] = None,
    partition: Annotated[
        str | None, option("one or several (default: louvain)", "--partition", "--partitions")
    ] = None,
    clients: Annotated[str | None, option("one or several numbers (default: 10)")] = None,
    model: Annotated[
        str | None,
        option(
            "one or several; gcn/gat: both, dealt over the clients (default: gcn)",
            "--model",
            "--models",
        ),
    ] = None,
    seeds: Annotated[
        int | None, option("seeds 0, 1, ... (default: 3, the fewest for a claim)")
    ] = None,
    rounds: Annotated[
        int | None, option("communication rounds (default: each method's own)")
    ] = None,
    engine: Annotated[str | None, option("how phases get run (default: loop)")] = None,
    set_: Annotated[
        list[str],
        option("table.key=value for all, METHOD.key=value for one; may be repeated", "--set"),
    ] = [],  # noqa: B006
    metric: Annotated[str, option("what is compared")] = "accuracy",
    out: Annotated[
        Path, option("folder for runs, tables and report; what is done there is not done again")
    ] = Path("compare"),
    jobs: Annotated[int, option("runs at a time (0 = as many as there are cores)")] = 0,
    on: Annotated[
        str,
        option(
            "who runs them: processes (of this machine) or ray (RAY_ADDRESS says which cluster)"
        ),
    ] = "processes",
    report: Annotated[bool, option("write report.html")] = True,
    as_json: AsJson = False,
) -> None:
    """Compare methods: run a grid of methods, datasets, partitions, numbers of clients and seeds, print the table, write the report."""
    axes = {
        "methods": methods,
        "datasets": dataset,
        "partitions": partition,
        "clients": clients,
        "models": model,
        "seeds": seeds,
    }
    given = {
        **{f"compare.{key}": value for key, value in axes.items()},
        "method.rounds": rounds,
        "run.engine": engine,
    }
    _commands().compare(grid, given, set_, metric, out, jobs, on, report, as_json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="run folders, or folders that such are in")],
    out: Annotated[Path, option("the page")] = Path("report.html"),
    metric: Annotated[str, option("what is compared")] = "accuracy",
    figures: Annotated[Path | None, option("folder for each figure as a file")] = None,
    formats: Annotated[str, option("of these files: png, svg, pdf")] = "png,svg,pdf",
    embeddings: Annotated[
        bool, option("compute embeddings in two dimensions, of each method's first seed")
    ] = False,
) -> None:
    """Make one HTML page of runs: tables, curves, traffic, clients, data. It needs no network to open."""
    from fedloom.experiments.report import command as reading

    reading.report(folders, out, metric, figures, formats, embeddings)


@app.command()
def watch(
    run: Annotated[
        Path,
        typer.Argument(help="a run folder, also one that is not there yet, or a folder of several"),
    ],
    port: Annotated[int, option("port of the page (0: one that is free)")] = 0,
    host: Annotated[
        str,
        option(
            "address to listen on; any other than this machine's own lets others in who have the token"
        ),
    ] = "127.0.0.1",
    browser: Annotated[bool, option("open the page in a browser", "--open/--no-open")] = False,
) -> None:
    """Follow a run in a browser: progress, curves, clients that dropped, traffic. Ctrl-C ends it; the run goes on."""
    from fedloom.experiments.report.watch import (
        watch as follow,  # not by way of commands: it needs no torch
    )

    follow(run, host, port, browser, lambda line: print(line, file=sys.stderr, flush=True))


@app.command()
def tune(
    recipe: RecipeFile = None, method: MethodName = None, dataset: Dataset = None, clients: Clients = None,
    partition: Partition = None, split: Split = None, model: Model = None, rounds: Rounds = None, seed: Seed = None,
    engine: Engine = None, secure: Secure = False, evaluation: Evaluation = None, set_: Set = [],  # noqa: B006
    over: Annotated[list[str], option("what to tune: method.lr, method.lr=0.001..0.1 or method.hops=1,2; may be repeated (default: all that is declared)")] = [],  # noqa: B006, E501
    trials: Annotated[int, option("how many settings to try, in all starts together")] = 30,
    minutes: Annotated[float, option("begin no trial after so many, in all starts together (0 = no limit)")] = 0.0,
    seeds: Annotated[int, option("seeds of a trial, which counts by their mean")] = 1,
    out: Annotated[Path | None, option("folder of the study, to go on in (default: one under tuned/, named after the task)")] = None,
    jobs: Annotated[int, option("trials at a time, each in a process of its own")] = 1, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Find a method's best settings by validation accuracy, and write them down as a recipe.

    Started again, it goes on where it was. `fedloom methods NAME` shows what is tuned over which range.
    """
    given = _given(
        method, dataset, clients, partition, split, model, rounds, seed, engine, secure, evaluation
    )
    _commands().tune(recipe, given, set_, over, trials, minutes, seeds, out, jobs, as_json)


def main() -> None:
    """Entry point of `fedloom`: every error of input is one line on stderr and exit code 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    atexit.register(
        gc.freeze
    )  # else Python looks for garbage among all that torch has made, before it ends: half a second
    try:
        with graceful_signals():
            sys.exit(app(standalone_mode=False))  # 130 after Ctrl-C
    except click.exceptions.Abort:
        sys.exit(130)
    except click.UsageError as error:
        commands = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
        _fail(
            unknown("command", sys.argv[1], commands)
            if "No such command" in error.message
            else error.format_message()
        )
    except RoundFailed as error:
        _fail(error, code=1)
    except FedloomError as error:
        _fail(error)
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}")


def _fail(reason: object, code: int = 2) -> NoReturn:
    print(f"fedloom: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(code)
