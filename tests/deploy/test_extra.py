"""The flower engine names the extra that it needs."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules['flwr'] = None
from fedloom.engines import engine_class
engine_class('flower')
"""


@pytest.mark.slow
def test_without_flower_the_engine_names_the_extra():
    done = subprocess.run([sys.executable, "-c", WITHOUT], stderr=subprocess.PIPE, text=True)
    assert "ConfigError: run.engine flower needs the package 'flwr" in done.stderr
    assert "pip install 'fedloom[flower]'" in done.stderr
