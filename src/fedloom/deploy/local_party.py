"""LocalParty: a party in its own process on this machine, for the flower engine.

    python -m fedloom.deploy.local_party

The process reads its settings from standard input, as one line of JSON. It ends when its standard
input is closed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.deploy.superlink import exit_with_parent
from fedloom.errors import FedloomError

if TYPE_CHECKING:
    from fedloom.core.client import Client


class LocalParty:
    """The process of a party.

    Args:
        folder: It holds the agreement and the keys. The party's graph, log and states go there.
        client: The client whose graph the party holds.
    """

    def __init__(self, folder: Path, client: Client):
        from fedloom.data.files import to_file

        self.name, self.folder, self.log = client.name, folder, folder / f"{client.name}.log"
        to_file(client.full_graph, folder / f"{client.name}.safetensors")
        self.start()

    def start(self) -> None:
        """Starts the process, or starts it again after it has ended."""
        with open(self.log, "ab") as log:
            # The party gets its own session, so that Ctrl-C reaches only the coordinator.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedloom.deploy.local_party"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        settings = {"folder": str(self.folder), "name": self.name}
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        self.process.stdin.flush()

    def state(self, lineage: str, mark: str) -> Path:
        """Returns the file of a saved state."""
        from fedloom.deploy.party import state_folder

        return state_folder(self.folder / self.name, lineage) / f"{mark}.safetensors"

    def require_alive(self) -> None:
        """Raises FedloomError if the process has ended."""
        if (code := self.process.poll()) is not None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            reason = f": {lines[-1]}" if lines else ""
            raise FedloomError(f"party {self.name!r} has ended with exit code {code}{reason}")

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _run(folder: str, name: str) -> None:
    from fedloom.deploy.agreement import read_agreement
    from fedloom.deploy.keys import read_party_key
    from fedloom.deploy.party import Party, run_party

    home = Path(folder)
    agreement = read_agreement(home / "federation.toml", trust=True)  # of the engine
    graph = agreement.graph(home / f"{name}.safetensors", name)
    key = read_party_key(home / f"{name}.key")
    party = Party(agreement, name, key, graph, home / name, tell_errors=True)
    run_party(party, lambda line: print(line, flush=True))


if __name__ == "__main__":
    settings = json.loads(sys.stdin.readline())
    exit_with_parent()
    _run(**settings)
