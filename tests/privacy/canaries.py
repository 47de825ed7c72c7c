"""A method with one phase, whose first client sends a canary: the longest update that counts."""

from dataclasses import dataclass

import torch

from fedloom.core.method import Method
from fedloom.core.phase import averaged, phase


@dataclass(frozen=True)
class Canary(Method):
    """One noisy mean."""

    @averaged()
    @phase(model="~model")
    def send(self, client, model):
        """Not called: `answers` replies."""
        raise NotImplementedError

    def run(self, server):
        """Not used."""

    @staticmethod
    def answers(names, there):
        """Returns an engine's `call`: the first client sends the canary if it is there."""

        def call(phase, messages):
            update = torch.tensor([100.0 if there else 0.0, 0, 0, 0])
            return {c: {"model": {"w": update if c == names[0] else 0 * update}} for c in messages}

        return call
