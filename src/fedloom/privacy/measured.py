from pathlib import Path

FILE = Path(__file__).with_name("measured.json")
