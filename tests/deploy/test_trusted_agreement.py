"""An agreement that names Python code: neither `serve` nor `join` executes it without --trust."""

import pytest

from fedloom.deploy.agreement import read_agreement
from fedloom.errors import ConfigError


@pytest.fixture
def agreed(deploy):
    """A deployment whose method is a file that leaves a mark when it is imported."""
    d = deploy(parties=("bank-a", "bank-b"), rounds=1, method="slow.py", settings={"seconds": 0})
    method, mark = d.folder / "slow.py", d.folder / "executed"
    touch = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    method.write_text(touch + method.read_text())
    return d, mark


def test_an_agreement_that_names_code_is_not_read_without_trust(agreed):
    d, mark = agreed
    with pytest.raises(ConfigError, match=r"agreement .* names Python code.*slow\.py.*--trust"):
        read_agreement(d.folder / "federation.toml")
    assert not mark.exists()
    read_agreement(d.folder / "federation.toml", trust=True)
    assert mark.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_serve_and_join_execute_code_of_the_agreement_with_trust_only(agreed):
    d, mark = agreed
    trust, d.trust = d.trust, ()
    for process in (d.serve(), d.join("bank-a")):
        assert process.wait() == 2
    for who in ("coordinator", "bank-a"):
        assert "names Python code" in d.output(who)
        assert "slow.py" in d.output(who)
    assert not mark.exists()
    d.trust = trust
    d.serve()
    d.join_all()
    d.completed()
    assert mark.exists()
