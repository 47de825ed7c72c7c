"""The command line. It parses the arguments; `fedloom.commands` does the work.

Exit codes: 2 after an error of input, with one line on stderr; 1 after a failed round; 130 after
Ctrl-C; 143 after SIGTERM.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer

from fedloom._system import graceful_signals, installed_version, plain_text
from fedloom.errors import ConfigError, FedloomError, RoundFailed, unknown
from fedloom.experiments import completion

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federated graph learning.",
)
# The base class of errors of input. Older versions of typer take it from click, newer ones have
# their own; `typer.BadParameter` is public in both.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


def option(help: str, *names: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Returns a command's option with its help text.

    Args:
        help: The help text.
        names: The option's names, if they are not that of the parameter.
        complete: Returns what a shell completes.
    """
    return typer.Option(*names, help=help, autocompletion=complete)


def argument(help: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Returns a command's positional argument with its help text. See `option`."""
    return typer.Argument(help=help, autocompletion=complete)


# What a shell completes.
METHODS, DATASETS, PARTITIONS, MODELS, ENGINES = map(
    completion.completing,
    (
        completion.methods,
        completion.datasets,
        completion.partitions,
        completion.models,
        completion.engines,
    ),
)
RecipeName = Annotated[
    str | None,
    argument(
        "PAPER/ENTRY (`fedloom recipes`) or a TOML file; options override it",
        completion.completing(completion.recipes),
    ),
]
MethodName = Annotated[
    str | None,
    option("a name (`fedloom methods`) or a file of your own (default: fedavg)", complete=METHODS),
]
Dataset = Annotated[
    str | None,
    option(
        "a name (`fedloom datasets`), a folder of tables, or synthetic:key=value,... "
        "(default: cora)",
        complete=DATASETS,
    ),
]
Clients = Annotated[int | None, option("number of clients (default: 10)")]
Partition = Annotated[
    str | None,
    option(
        "how the graph is divided (`fedloom partitions`) (default: louvain; dirichlet for a set "
        "of graphs)",
        complete=PARTITIONS,
    ),
]
Split = Annotated[
    str | None, option('"20/40/40", "global 10/10/80" or "public" (default: the dataset\'s)')
]
Model = Annotated[
    str | None,
    option(
        "e.g. gcn or gcn-4x128; several, as in gcn,gat,sage, are used in turn (default: gcn)",
        complete=MODELS,
    ),
]
Rounds = Annotated[int | None, option("communication rounds (default: 100)")]
Epochs = Annotated[
    int | None, option("local epochs in a round: method.epochs (default: the method's)")
]
LearningRate = Annotated[
    float | None, option("learning rate: method.lr (default: the method's)", "--lr")
]
Engine = Annotated[
    str | None,
    option(
        "how clients run: auto, loop, stacked, wire, processes, stacked_processes, ray or flower "
        "(default: auto, the fastest that gives the run what it asks for)",
        complete=ENGINES,
    ),
]
Device = Annotated[str | None, option("where tensors are computed: cpu (default: cpu)")]
Secure = Annotated[bool, option("the server sees only masked sums of the clients' replies")]
Aggregation = Annotated[
    str | None,
    option(
        "how the server combines weights: mean, clipped, median, trimmed, krum, multi-krum, "
        "geometric-median or centered-clipping (default: mean)"
    ),
]
AdversaryClients = Annotated[int | None, option("clients that lie, in a simulation (default: 0)")]
Attack = Annotated[
    str | None,
    option(
        "what they do: sign-flip, scale, noise, label-flip, alie, ipm, free-rider or size "
        "(default: sign-flip)"
    ),
]
Epsilon = Annotated[
    float | None,
    option("differential privacy: the most that the run may spend, above 0 (default: none)"),
]
Delta = Annotated[float | None, option("differential privacy: δ (default: 1e-5)")]
Evaluation = Annotated[
    str | None,
    option("which model is scored: local, global or common (default: the method's)"),
]
Seed = Annotated[int | None, option("root of every random stream (default: 0)")]
Set = Annotated[list[str], option("table.key=value, e.g. method.lr=0.02; repeatable", "--set")]
AsJson = Annotated[bool, option("print JSON on stdout and nothing else", "--json")]
Wide = Annotated[bool, option("print all columns, wider than 80 characters", "--wide")]
TrackBy = Annotated[
    str,
    option(
        "tensorboard, mlflow or both; NAME+clients adds each client; NAME:WHERE is a folder or URI"
    ),
]
Agreement = Annotated[Path, argument("the TOML file that all parties have agreed on")]
Trust = Annotated[
    bool, option("execute the Python files that the file or folder names: read them first")
]
Insecure = Annotated[bool, option("no TLS; on this machine only")]
Folder = Annotated[Path, argument("a run folder")]
Out = Annotated[Path | None, option("run folder (default: a new one under runs/)")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedloom {installed_version()}")
        raise typer.Exit


@app.callback()
def fedloom(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Federated graph learning."""


def _commands() -> ModuleType:
    with _collecting_no_modules():
        from fedloom import commands  # imports torch, which --help and input errors do not wait for
    return commands


@contextmanager
def _collecting_no_modules() -> Iterator[None]:
    """Exempts the modules that the block imports, torch among them, from garbage collection.

    They are no garbage, and looking for some among them takes a tenth of a second.
    """
    if "torch" in sys.modules:  # another program runs the command
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


# The settings of a recipe that options stand for.
_OPTIONS = {
    "method": "method.name",
    "rounds": "method.rounds",
    "epochs": "method.epochs",
    "lr": "method.lr",
    "dataset": "data.dataset",
    "split": "data.split",
    "model": "model.name",
    "partition": "partition.name",
    "clients": "partition.clients",
    "seed": "run.seed",
    "engine": "run.engine",
    "device": "run.device",
    "evaluation": "run.evaluation",
    "secure": "run.secure",
    "aggregation": "run.aggregation",
    "adversary_clients": "adversary.clients",
    "attack": "adversary.attack",
    "epsilon": "run.dp_epsilon",
    "delta": "run.dp_delta",
}


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a command's options as settings of a recipe; None for one that was not given.

    options: the command's arguments by name. Those that are no settings are left out.
    """
    found = {key: options[name] for name, key in _OPTIONS.items() if name in options}
    if found.get("run.dp_epsilon") == 0:  # in a recipe, 0 is "off"
        raise ConfigError("--epsilon is 0, must be above 0; without it there is no noise")
    return {**found, "run.secure": found["run.secure"] or None}


@app.command()
def run(
    recipe: RecipeName = None,
    method: MethodName = None,
    dataset: Dataset = None,
    clients: Clients = None,
    partition: Partition = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    seed: Seed = None,
    engine: Engine = None,
    device: Device = None,
    secure: Secure = False,
    aggregation: Aggregation = None,
    adversary_clients: AdversaryClients = None,
    attack: Attack = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    evaluation: Evaluation = None,
    set_: Set = [],  # noqa: B006
    out: Out = None,
    baselines: Annotated[
        str,
        option(
            "methods to run on the same federation for comparison, e.g. local,central; the run "
            "folder keeps their results",
            complete=METHODS,
        ),
    ] = "",
    track: TrackBy = "",
    trust: Trust = False,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Run a method on a federation and save everything in a run folder.

    RECIPE is PAPER/ENTRY, as `fedloom recipes` lists them, or a TOML file. Options and --set
    override its settings.
    """
    given = _given(locals())
    _commands().run(recipe, given, set_, out, baselines, as_json, track, wide, trust)


@app.command()
def resume(
    folder: Folder,
    track: TrackBy = "",
    trust: Trust = False,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run that was stopped or killed.

    FOLDER is its run folder. The result is bit-identical to that of an uninterrupted run.
    """
    _commands().resume(folder, as_json, track, wide, trust)


@app.command()
def show(folder: Folder, wide: Wide = False, as_json: AsJson = False) -> None:
    """Print the result of a run again, and those of its baselines.

    FOLDER is the run folder.
    """
    _commands().show(folder, as_json, wide)


@app.command()
def predict(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="a run folder, a party's folder, or a model's .safetensors file"
        ),
    ],
    data: Annotated[
        str | None,
        option(
            "the new graph: a folder of tables, a .safetensors or .pt file, or a dataset "
            "(default: the clients' own data)"
        ),
    ] = None,
    out: Annotated[
        Path | None, option("the table to write, .csv or .parquet (default: CSV on stdout)")
    ] = None,
    client: Annotated[str | None, option("whose model predicts (default: the server's)")] = None,
    which: Annotated[str, option("best (validation round) or final (round)", "--model")] = "best",
    trust: Trust = False,
) -> None:
    """Predict the classes of new data with a model of a run.

    RUN is a run folder, a party's folder, or a model's .safetensors file.
    """
    with _collecting_no_modules():
        from fedloom.experiments import predict_command

    predict_command.predict(source, data, out, client, which, trust)


@app.command()
def audit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="a run folder, PAPER/ENTRY (`fedloom recipes`) or a TOML file"
        ),
    ],
    attack: Annotated[
        list[str],
        option(
            "labels, membership, links, features, inversion, prototypes, stand-ins or cohorts; "
            "repeatable (default: all)",
            complete=completion.completing(completion.attacks),
        ),
    ] = [],  # noqa: B006
    shadows: Annotated[int, option("shadow models for membership (0 = none)")] = 8,
    out: Annotated[
        Path | None, option("folder for audit.json and audit.csv (default: the run folder)")
    ] = None,
    set_: Set = [],  # noqa: B006
    trust: Trust = False,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Attack a run and measure what its messages and its model tell about the clients' data.

    RUN is a run folder or a recipe. The run is repeated with the same seed, and each attack gets
    exactly what its attacker sees: the server, a client or an outsider.
    """
    _commands().audit(source, attack, shadows, out, set_, trust, wide, as_json)


@app.command()
def recipes(
    paper: Annotated[
        str | None,
        argument("list the recipes of this paper only", completion.completing(completion.papers)),
    ] = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes: for each number of a paper its settings and the expected value.

    With PAPER, it lists the recipes of this paper only.
    """
    _commands().list_recipes(paper, as_json, wide)


@app.command()
def methods(
    name: Annotated[str | None, argument("show this method in full", METHODS)] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or show one: its paper, equations, messages and settings.

    NAME is the method to show in full.
    """
    if name:
        _commands().show_method(name, as_json)
        return
    from fedloom.experiments.report.listing import print_listing  # needs no torch

    print_listing(completion.described_methods(), as_json)


@app.command()
def datasets(wide: Wide = False, as_json: AsJson = False) -> None:
    """List the datasets, and which of them are on this machine."""
    _commands().list_datasets(as_json, wide)


@app.command()
def partitions(as_json: AsJson = False) -> None:
    """List the ways to divide a graph over clients."""
    _commands().list_partitions(as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the model architectures."""
    _commands().list_models(as_json)


@app.command()
def partition(
    dataset: Dataset = None,
    clients: Clients = None,
    partition: Partition = None,
    split: Split = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006
    plot: Annotated[Path | None, option("write a picture: .png, .svg or .pdf")] = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Divide a graph and show the statistics of each client's part."""
    given = {
        "data.dataset": dataset,
        "partition.name": partition,
        "partition.clients": clients,
        "run.seed": seed,
        "data.split": split,
    }
    _commands().partition(given, set_, plot, as_json, wide)


class _KeysGroup(typer.core.TyperGroup):
    """The commands of `fedloom keys`. Without the name of one, it is `make`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses `fedloom keys HOST ...` as `fedloom keys make HOST ...`."""
        named = args and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else ["make", *args])


keys = typer.Typer(
    cls=_KeysGroup,
    help="Make, show, replace and revoke the keys of a deployment.",
    epilog="`fedloom keys HOST --party NAME` is short for `fedloom keys make HOST --party NAME`.",
)
app.add_typer(keys, name="keys")
Days = Annotated[int, option("how many days the keys are valid")]


@keys.command("make")
def make_keys(
    host: Annotated[
        str | None, argument("the coordinator's DNS name or IP address, for the parties")
    ] = None,
    party: Annotated[list[str], option("make keys for a party of this name; repeatable")] = [],  # noqa: B006
    out: Annotated[Path, option("folder for the files; no file is overwritten")] = Path("keys"),
    days: Days = 365,
) -> None:
    """Make the keys of a deployment: the coordinator's certificates, and a pair for each party.

    HOST is the DNS name or IP address at which parties reach the coordinator. Without it, only
    the parties' keys are made. --days also holds for the server's certificate.
    """
    _commands().make_keys(host, party, out, days)


@keys.command("show")
def show_keys(
    where: Annotated[Path, argument("an agreement, or a folder with .pub files")] = Path("keys"),
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show keys: until when they are valid, what they replaced, and whether they are revoked.

    WHERE is an agreement (all its parties) or a folder with .pub files and certificates.
    """
    _commands().show_keys(where, as_json, trust)


@keys.command("rotate")
def rotate_key(
    key: Annotated[Path, argument("this party's NAME.key")],
    days: Days = 365,
) -> None:
    """Replace this party's key by a new one, without a new agreement.

    KEY is the party's NAME.key, which signs the new one. The new files lie beside it.
    """
    _commands().rotate_key(key, days)


@keys.command("revoke")
def revoke_key(
    agreement: Agreement,
    party: Annotated[str, argument("the party whose keys do not count any more")],
    keys: Annotated[Path, option("folder with ca.key")] = Path("keys"),
    reason: Annotated[str, option("compromised, superseded or left")] = "compromised",
    trust: Trust = False,
) -> None:
    """Revoke the keys of a party, for good: a new list of revoked keys, signed by the authority.

    AGREEMENT is the coordinator's copy. The list is ca.crl beside ca.crt. A running `fedloom serve`
    reads it, and every party receives it.
    """
    _commands().revoke_key(agreement, party, keys, reason, trust)


@app.command()
def serve(
    agreement: Agreement,
    keys: Annotated[Path, option("folder with coordinator.key, server.crt and server.key")] = Path(
        "keys"
    ),
    out: Out = None,
    wait: Annotated[
        float, option("seconds to wait for all parties; after that a quorum is enough")
    ] = 600.0,
    insecure: Insecure = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Coordinate a federation: wait for the parties of an agreement, then run its method.

    AGREEMENT is the TOML file that all parties have agreed on (docs/deploy.md).
    """
    _commands().serve(agreement, keys, out, wait, insecure, as_json, trust=trust)


@app.command()
def join(
    agreement: Agreement,
    party: Annotated[str, option("this party's name in the agreement")],
    key: Annotated[Path, option("this party's NAME.key")],
    data: Annotated[
        Path, option("this party's graph: a folder of tables, a .safetensors file, or PyG's .pt")
    ],
    state: Annotated[
        Path | None, option("folder for this party's states and model (default: fedloom-NAME)")
    ] = None,
    patience: Annotated[float, option("seconds to wait for an absent coordinator")] = 3600.0,
    tell_errors: Annotated[
        bool,
        option("send the text of errors to the coordinator; it may contain values of the graph"),
    ] = False,
    socket: Annotated[
        Path | None, option("take orders from Flower's own SuperNode, at this Unix socket")
    ] = None,
    insecure: Insecure = False,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline/--no-baseline",
            help="train this party's own model too, without the others, to compare",
        ),
    ] = True,
    trust: Trust = False,
) -> None:
    """Take part in a federation with a graph that stays on this machine.

    AGREEMENT is the TOML file that all parties have agreed on (docs/deploy.md).
    """
    _commands().join(
        agreement, party, key, data, state, patience, tell_errors, socket, insecure, baseline, trust
    )


@app.command()
def compare(
    grid: Annotated[
        Path | None, argument("a TOML file with a table [compare]; options override it")
    ] = None,
    methods: Annotated[
        str | None,
        option("names or files, separated by commas; local is always included", complete=METHODS),
    ] = None,
    dataset: Annotated[
        str | None,
        option(
            "one or several, separated by commas (default: cora)",
            "--dataset",
            "--datasets",
            complete=DATASETS,
        ),
    ] = None,
    partition: Annotated[
        str | None,
        option(
            "one or several (default: louvain; dirichlet for a set of graphs)",
            "--partition",
            "--partitions",
            complete=PARTITIONS,
        ),
    ] = None,
    clients: Annotated[str | None, option("one or several numbers (default: 10)")] = None,
    model: Annotated[
        str | None,
        option(
            "one or several; gcn/gat gives the clients both in turn (default: gcn)",
            "--model",
            "--models",
            complete=MODELS,
        ),
    ] = None,
    seeds: Annotated[
        int | None, option("number of seeds: 0, 1, ... (default: 3, the minimum for a claim)")
    ] = None,
    rounds: Annotated[
        int | None, option("communication rounds (default: each method's own)")
    ] = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    engine: Annotated[
        str | None, option("how clients run (default: auto)", complete=ENGINES)
    ] = None,
    device: Device = None,
    set_: Annotated[
        list[str],
        option("table.key=value for all, METHOD.key=value for one; repeatable", "--set"),
    ] = [],  # noqa: B006
    metric: Annotated[
        str, option("the score to compare (default: the one that chooses the best round)")
    ] = "",
    out: Annotated[
        Path, option("folder for runs, tables and report; finished runs there are cached")
    ] = Path("compare"),
    jobs: Annotated[int, option("concurrent runs (0 = the number of cores)")] = 0,
    on: Annotated[
        str,
        option("where runs execute: processes (of this machine) or ray (cluster: RAY_ADDRESS)"),
    ] = "processes",
    report: Annotated[bool, option("write report.html")] = True,
    trust: Trust = False,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods over datasets, partitions, numbers of clients, models and seeds.

    Runs the grid, prints the table and writes the report. GRID is a TOML file with a table
    [compare]. Options and --set override it.
    """
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
        "method.epochs": epochs,
        "method.lr": lr,
        "run.engine": engine,
        "run.device": device,
    }
    _commands().compare(grid, given, set_, metric, out, jobs, on, report, as_json, wide, trust)


@app.command()
def report(
    folders: Annotated[list[Path], argument("run folders, or folders that hold some")],
    out: Annotated[Path, option("the page")] = Path("report.html"),
    metric: Annotated[
        str, option("the score to compare (default: the one that chooses the best round)")
    ] = "",
    figures: Annotated[Path | None, option("folder for each figure as a file")] = None,
    formats: Annotated[str, option("formats of these files: png, svg, pdf")] = "png,svg,pdf",
    embeddings: Annotated[
        bool, option("compute embeddings in two dimensions, of each method's first seed")
    ] = False,
    trust: Trust = False,
) -> None:
    """Write runs as one HTML page: tables, curves, traffic, clients, data.

    FOLDERS are run folders, or folders that hold some. The page needs no network.
    """
    from fedloom.experiments.report import command as reading

    reading.report(folders, out, metric, figures, formats, embeddings, trust)


@app.command()
def watch(
    run: Annotated[
        Path,
        argument("a run folder, which may not exist yet, or a folder of several"),
    ],
    port: Annotated[int, option("port of the page (0 = a free one)")] = 0,
    host: Annotated[
        str,
        option(
            "address to listen on; other machines that reach it can open the page with the token"
        ),
    ] = "127.0.0.1",
    browser: Annotated[bool, option("open the page in a browser", "--open/--no-open")] = False,
) -> None:
    """Follow a run in a browser: progress, curves, absent clients, traffic.

    RUN is a run folder, which may not exist yet, or a folder of several. Ctrl-C ends the page. The
    run goes on.
    """
    from fedloom.experiments.report.watch import watch as follow  # needs no torch

    follow(run, host, port, browser, lambda line: print(line, file=sys.stderr, flush=True))


@app.command()
def tune(
    recipe: RecipeName = None,
    method: MethodName = None,
    dataset: Dataset = None,
    clients: Clients = None,
    partition: Partition = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    seed: Seed = None,
    engine: Engine = None,
    device: Device = None,
    secure: Secure = False,
    epsilon: Epsilon = None,
    delta: Delta = None,
    evaluation: Evaluation = None,
    set_: Set = [],  # noqa: B006
    over: Annotated[
        list[str],
        option(
            "what to tune: method.lr, method.lr=0.001..0.1 or method.hops=1,2; repeatable "
            "(default: all settings with a declared range)"
        ),
    ] = [],  # noqa: B006
    trials: Annotated[int, option("number of trials, over all starts of the study")] = 30,
    minutes: Annotated[
        float, option("start no trial after this time, over all starts (0 = no limit)")
    ] = 0.0,
    seeds: Annotated[int, option("seeds of a trial; their mean counts")] = 1,
    out: Annotated[
        Path | None,
        option("folder of a new or earlier study (default: under tuned/, named after the task)"),
    ] = None,
    jobs: Annotated[int, option("concurrent trials, each in a process of its own")] = 1,
    trust: Trust = False,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Find a method's best settings by validation accuracy, and write them as a recipe.

    RECIPE is PAPER/ENTRY, as `fedloom recipes` lists them, or a TOML file. Options and --set
    override its settings. Started again, it continues the study. `fedloom methods NAME` shows the
    declared ranges.
    """
    given = _given(locals())
    _commands().tune(
        recipe, given, set_, over, trials, minutes, seeds, out, jobs, as_json, wide, trust
    )


def main() -> None:
    """Entry point of `fedloom`. An error of input is one line on stderr and exit code 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    # Without this, Python collects torch's garbage before it ends, which takes half a second.
    atexit.register(gc.freeze)
    try:
        with graceful_signals():
            sys.exit(app(standalone_mode=False))  # 130 after Ctrl-C
    except typer.Abort:
        sys.exit(130)
    except _UsageError as error:
        if "No such command" in error.message:
            group = typer.main.get_command(app)
            assert isinstance(group, typer.core.TyperGroup)
            _fail(unknown("command", sys.argv[1], group.commands))
        _fail(error.format_message())
    except RoundFailed as error:
        _fail(error, code=1)
    except FedloomError as error:
        _fail(error)
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}")


def _fail(reason: object, code: int = 2) -> NoReturn:
    print(f"fedloom: {plain_text(reason, 10_000)}", file=sys.stderr)
    sys.exit(code)
