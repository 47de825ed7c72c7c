"""A SuperLink without one of its protections, for the controls of test_door.py.

FEDLOOM_OPEN=signature python -m open_door
"""

import os

from fedloom.deploy import superlink
from fedloom.deploy.request_signature import Verifier
from fedloom.deploy.superlink import ACTIVATE, PARTY_KEY, Door, _Body


def without_signature():
    """Takes the key that a request states as proof, and bodies of any size, as at first."""
    without_size()

    def claimed(self, headers, scope):
        return headers.get(PARTY_KEY, ""), ""

    Door._authenticate = claimed
    Door._is_conflict = lambda self, path, status: path.endswith(ACTIVATE) and status != 401
    _Body.__call__ = lambda self: self._receive()


def without_nonce():
    """Accepts a request as often as it comes."""
    Verifier._require_new = lambda *given: None


def without_size():
    """Accepts an answer of any size."""
    Door._require_room = lambda *given: None


if __name__ == "__main__":
    globals()[f"without_{os.environ['FEDLOOM_OPEN']}"]()
    superlink.main()
