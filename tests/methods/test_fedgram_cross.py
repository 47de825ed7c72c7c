"""FedGram over cut edges."""

from tests.methods.test_fedgram import OTHER, QUICK  # noqa: F401
