"""Makes docs/report.png and docs/watch.png, and both in the size of a phone.

The first shows the report of nine methods on Cora, the second the page that follows a run.

python docs/pictures.py            runs the comparison first (3 minutes on two quiet cores; finished
                                   runs are cached)
python docs/pictures.py FOLDER     uses an existing comparison
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
METHODS = "local,fedgram,fedavg,fedprox,fedpg,fedgkc,opfgl,fedstruct,fedgh"
GRID = [
    "--dataset",
    "cora",
    "--clients",
    "10",
    "--partition",
    "louvain",
    "--seeds",
    "3",
    "--rounds",
    "30",
]
SIZES = {"": (1400, 1400), "-phone": (390, 1400)}
FOLLOWED = [
    "run",
    "--method",
    "fedgkc",
    "--model",
    "gcn,gat,sage",
    "--rounds",
    "200",
    "--out",
    "cora-fedgkc",
]
AT = 60  # the round at which the picture is taken


def fedloom(*arguments: str | Path, cwd: Path = ROOT) -> None:
    """Runs a command of fedloom with this Python."""
    subprocess.run([sys.executable, "-m", "fedloom", *map(str, arguments)], check=True, cwd=cwd)


def main() -> None:
    """Runs the comparison, writes the report and takes the pictures."""
    sys.path.insert(0, str(ROOT))
    from tests.chromium import browser

    folder = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "runs" / "pictures"
    if not sys.argv[1:]:
        fedloom("compare", "--methods", METHODS, *GRID, "--out", folder)
    with tempfile.TemporaryDirectory() as made, browser() as new_tab:
        place = Path(made)
        # The page prints the command. The link keeps paths of this machine out of it.
        (place / "compare").symlink_to(folder.resolve())
        fedloom("report", "compare/runs", "--out", "report.html", cwd=place)
        take(new_tab, "report", (place / "report.html").as_uri())
        with following(place) as url:
            take(new_tab, "watch", url)


@contextmanager
def following(place: Path) -> Iterator[str]:
    """Starts a run and a server that follows it. Yields the address of the page."""
    from fedloom.experiments.report.watch import Watch

    run = subprocess.Popen(
        [sys.executable, "-m", "fedloom", *FOLLOWED], cwd=place, stderr=subprocess.DEVNULL
    )
    with Watch(place / FOLLOWED[-1]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while (server.data("", 0, 0) or {})["round"] < AT:
            if run.poll() is not None:
                raise RuntimeError(f"the run ended before round {AT}, so there is no picture")
            time.sleep(0.1)
        yield server.url
        server.shutdown()
    run.terminate()
    run.wait()


def take(new_tab: Callable[[], Any], name: str, url: str) -> None:
    """Takes a picture of a page in each size, and compresses it."""
    for suffix, (width, height) in SIZES.items():
        tab, picture = new_tab(), ROOT / "docs" / f"{name}{suffix}.png"
        tab.size(width, height)
        tab.open(url)
        tab.wait("document.querySelectorAll('figure svg').length")
        tab.settle()
        tab.screenshot(picture, whole=False)
        image = Image.open(picture).convert("RGB")
        image.save(picture, optimize=True)
        print(f"{picture}: {image.width} x {image.height}, {picture.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
