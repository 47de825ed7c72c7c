"""What a user can type. Errors of input are a line on stderr and exit code 2; a failed round 1, Ctrl-C 130, SIGTERM 143."""

from __future__ import annotations

import atexit
import gc
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer

from fedloom.errors import FedloomError, RoundFailed, unknown
from fedloom.stopping import in_order

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Federated graph learning.")


def option(help: str, *names: str) -> Any:
    """A command's option with its help text."""
    return typer.Option(*names, help=help)


Dataset = Annotated[str | None, option("a name (`fedloom datasets`), a folder of tables, or synthetic:key=value,... (default: cora)")]
Clients = Annotated[int | None, option("number of clients (default: 10)")]
Partition = Annotated[str | None, option("how the graph is divided (`fedloom partitions`) (default: louvain)")]
Split = Annotated[str | None, option('"20/40/40", "global 10/10/80" or "public" (default: the dataset\'s usual one)')]
Seed = Annotated[int | None, option("root of every random stream (default: 0)")]
Set = Annotated[list[str], option("table.key=value, e.g. method.lr=0.02; may be repeated", "--set")]
AsJson = Annotated[bool, option("one JSON object on stdout, nothing else there", "--json")]
Agreement = Annotated[Path, typer.Argument(help="the TOML file that all parties have agreed on")]
Insecure = Annotated[bool, option("without TLS: on this machine only")]
Folder = Annotated[Path, typer.Argument(help="a run folder")]


def _commands() -> Any:
    from fedloom import commands  # imports torch: only now, so that --help and typing errors answer at once

    return commands


@app.command()
def run(
    recipe: Annotated[Path | None, typer.Argument(help="a TOML file; options and --set override it")] = None,
    method: Annotated[str | None, option("a name (`fedloom methods`) or a file of your own (default: fedavg)")] = None,
    dataset: Dataset = None, clients: Clients = None, partition: Partition = None, split: Split = None,
    model: Annotated[str | None, option("e.g. gcn, gcn-4x128, or several dealt over the clients: gcn,gat,sage (default: gcn)")] = None,
    rounds: Annotated[int | None, option("communication rounds (default: 100)")] = None, seed: Seed = None,
    engine: Annotated[str | None, option("how phases get run: loop, stacked, wire, processes, ray or flower (default: loop)")] = None,
    secure: Annotated[bool, option("the server gets masked sums of the clients' replies and nothing else")] = False,
    evaluation: Annotated[str | None, option("whose model is scored: local, global or common (default: the method's first)")] = None,
    set_: Set = [],  # noqa: B006
    out: Annotated[Path | None, option("run folder (default: a new one under runs/)")] = None,
    beside: Annotated[str, option("methods to run on the same federation for comparison, e.g. local,central")] = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Run a method on a federation and keep everything in a run folder.

    RECIPE is a TOML file; options and --set override what it says.
    """
    given = {
        "method.name": method, "method.rounds": rounds, "data.dataset": dataset, "data.split": split, "model.name": model,
        "partition.name": partition, "partition.clients": clients, "run.seed": seed, "run.engine": engine, "run.evaluation": evaluation,
        "run.secure": secure or None,
    }  # fmt: skip
    _commands().run(recipe, given, set_, out, beside, as_json)


@app.command()
def resume(folder: Folder, as_json: AsJson = False) -> None:
    """Go on with a run that was stopped or killed; the result is the same, to the bit, as if it had not been."""
    _commands().resume(folder, as_json)


@app.command()
def show(folder: Folder, as_json: AsJson = False) -> None:
    """Print a run's result again."""
    _commands().show(folder, as_json)


@app.command()
def methods(name: Annotated[str | None, typer.Argument(help="show this one in full")] = None) -> None:
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
    given = {"data.dataset": dataset, "partition.name": partition, "partition.clients": clients, "run.seed": seed, "data.split": split}
    _commands().partition(given, set_, plot, as_json)


@app.command()
def keys(
    host: Annotated[str | None, typer.Argument(help="DNS name or IP address under which parties reach the coordinator")] = None,
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
    data: Annotated[Path, option("this party's graph: a folder of tables, a .safetensors file, or PyG's .pt")],
    state: Annotated[Path | None, option("folder for the party's own states and model (default: fedloom-NAME)")] = None,
    patience: Annotated[float, option("seconds to wait for a coordinator that is not there")] = 3600.0,
    tell_errors: Annotated[bool, option("tell the coordinator the words of every error; values of the graph may be in them")] = False,
    socket: Annotated[Path | None, option("take orders from Flower's own SuperNode, at this Unix socket")] = None,
    insecure: Insecure = False,
) -> None:
    """Take part in a federation with a graph of one's own, which stays here (docs/deploy.md)."""
    _commands().join(agreement, party, key, data, state, patience, tell_errors, socket, insecure)


def main() -> None:
    """Entry point of `fedloom`: every error of input is one line on stderr and exit code 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    atexit.register(gc.freeze)  # else Python looks for garbage among all that torch has made, before it ends: half a second
    try:
        with in_order():
            sys.exit(app(standalone_mode=False))  # 130 after Ctrl-C
    except click.exceptions.Abort:
        sys.exit(130)
    except click.UsageError as error:
        commands = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
        _fail(unknown("command", sys.argv[1], commands) if "No such command" in error.message else error.format_message())
    except RoundFailed as error:
        _fail(error, code=1)
    except FedloomError as error:
        _fail(error)
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}")


def _fail(reason: object, code: int = 2) -> NoReturn:
    print(f"fedloom: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(code)
