"""InProcess: a deployment whose parties are objects of this process. It needs Flower's package."""

from deployment import Deployment, InProcessTransport

from fedloom.core.absence import FaultPolicy
from fedloom.core.message import Absent, encode
from fedloom.deploy.agreement import read_agreement
from fedloom.deploy.coordinator import Coordinator
from fedloom.deploy.keys import read_party_key
from fedloom.deploy.party import Party
from fedloom.deploy.serve import serve
from fedloom.experiments.run import agree_on_facts
from fedloom.nn.weights import weights


class InProcess:
    """A deployment whose parties are objects of this process."""

    def __init__(self, folder, baseline=False, **settings):
        self.deployment = Deployment(folder, tls=False, **settings)
        self.folder = folder
        self.agreement = read_agreement(folder / "federation.toml", trust=True)
        parties = {n: self.party(n, baseline=baseline) for n in self.agreement.parties}
        self.transport = InProcessTransport(parties)

    def party(self, name, agreement="federation.toml", **options):
        agreement = read_agreement(self.folder / agreement, trust=True)
        graph = agreement.graph(self.folder / f"{name}.safetensors", name)
        key = read_party_key(self.folder / f"{name}.key")
        return Party(agreement, name, key, graph, self.folder / f"state-{name}", **options)

    def serve(self, **options):
        return serve(
            self.agreement,
            self.folder,
            self.folder / "run",
            **{
                "log": lambda line: None,
                "wait": 0.0,
                "open_transport": lambda: self.transport,
                **options,
            },
        )

    def coordinator(self, **policy):
        key = read_party_key(self.folder / "coordinator.key")
        return Coordinator(
            self.agreement, self.transport, key, "lineage", FaultPolicy(**{"quorum": 0.5, **policy})
        )

    def begun(self, **policy):
        """Returns a coordinator whose parties have begun a run and were set up."""
        made = self.coordinator(**policy)
        roster = made.wait_for_parties(0.0, 1, lambda line: None)
        self.facts = agree_on_facts(
            self.agreement.make_method(), "fedavg", roster, "gcn-2x8", 0.5, self.agreement.run
        )
        made.begin(self.facts)
        bodies = dict.fromkeys(self.agreement.parties, encode({}, "setup"))
        assert not absences(made.ask("setup", bodies, 0))
        return made

    def train(self, made, round=1):
        model = weights(self.facts.build("gcn-2x8", "server"))
        bodies = dict.fromkeys(self.agreement.parties, encode({"model": model}, "train"))
        return made.ask("train", bodies, round)


def absences(answers):
    return {name: answer.cause for name, answer in answers.items() if isinstance(answer, Absent)}
