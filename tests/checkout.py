"""Paths in this checkout that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "models" / "demo.gguf"
