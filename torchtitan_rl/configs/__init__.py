"""The config registry. In a checkout its files are those of the folder configs/ beside the package; an installed wheel has
that folder here (setup.py)."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "configs")]
