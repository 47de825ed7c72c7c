"""Makes docs/report.png and docs/report-phone.png: the report of nine methods on Cora, as Chromium shows it.

python docs/pictures.py              runs the comparison first (3 minutes on two quiet cores; what is done is not done again)
python docs/pictures.py FOLDER       of a comparison that is there already
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
METHODS = "local,fedavg,fedprox,fedproto,fedpg,fedgkc,opfgl,fedstruct,fedgh"
GRID = ["--dataset", "cora", "--clients", "10", "--partition", "louvain", "--seeds", "3", "--rounds", "30"]
SIZES = {"report": (1400, 1400), "report-phone": (390, 1400)}


def fedloom(*arguments: str | Path, cwd: Path = ROOT) -> None:
    """The command, with this Python."""
    subprocess.run([sys.executable, "-m", "fedloom", *map(str, arguments)], check=True, cwd=cwd)


def main() -> None:
    """Runs, reports, takes the pictures, and makes them small."""
    sys.path.insert(0, str(ROOT))
    from tests.chromium import browser

    folder = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "runs" / "pictures"
    if not sys.argv[1:]:
        fedloom("compare", "--methods", METHODS, *GRID, "--out", folder)
    with tempfile.TemporaryDirectory() as made, browser() as new_tab:
        (Path(made) / "compare").symlink_to(folder.resolve())  # the page prints the command, which should be nobody's paths
        fedloom("report", "compare/runs", "--out", "report.html", cwd=Path(made))
        for name, (width, height) in SIZES.items():
            tab, picture = new_tab(), ROOT / "docs" / f"{name}.png"
            tab.size(width, height)
            tab.open((Path(made) / "report.html").as_uri())
            tab.screenshot(picture, whole=False)
            image = Image.open(picture).convert("RGB")
            image.save(picture, optimize=True)
            print(f"{picture}: {image.width} x {image.height}, {picture.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
