"""Parties on this machine, for the flower engine: a process each, which ends when whoever started it does.

python -m fedloom.deploy.local_party        reads its settings as one line of JSON from standard input, and ends when that is closed
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.errors import FedloomError

if TYPE_CHECKING:
    from fedloom.core.client import Client


class LocalParty:
    """A party's process. folder: has the agreement and the keys; the party's graph and log go there, and to a folder in it its states."""

    def __init__(self, folder: Path, client: Client):
        from fedloom.data.files import to_file

        self.name, self.folder, self.log = client.name, folder, folder / f"{client.name}.log"
        to_file(client.full_graph, folder / f"{client.name}.safetensors")
        self.start()

    def start(self) -> None:
        """Starts the process; also again, if it has ended."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedloom.deploy.local_party"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )  # a session of its own: Ctrl-C is the coordinator's to hear
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"folder": str(self.folder), "name": self.name}).encode() + b"\n"
        )
        self.process.stdin.flush()

    def state(self, lineage: str, mark: str) -> Path:
        """Where the party keeps a state."""
        from fedloom.deploy.party import kept_in

        return kept_in(self.folder / self.name, lineage) / f"{mark}.safetensors"

    def require_alive(self) -> None:
        """Raises if the process has ended."""
        if (code := self.process.poll()) is not None:
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise FedloomError(
                f"party {self.name!r} has ended with exit code {code}{f': {said[-1]}' if said else ''}"
            )

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _take_part(folder: str, name: str) -> None:
    from fedloom.deploy.agreement import read_agreement
    from fedloom.deploy.keys import read_party_key
    from fedloom.deploy.party import Party, take_part

    home = Path(folder)
    agreement = read_agreement(home / "federation.toml")
    graph = agreement.graph(home / f"{name}.safetensors", name)
    party = Party(
        agreement, name, read_party_key(home / f"{name}.key"), graph, home / name, tell_errors=True
    )
    take_part(party, lambda line: print(line, flush=True))


def _end_with_parent() -> None:
    sys.stdin.read()  # whoever started this holds the other end
    os._exit(0)


if __name__ == "__main__":
    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _take_part(**settings)
