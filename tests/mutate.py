"""``make mutate``: break the line each scenario test must notice, one by one, and see its test turn red.

The files of ``tests/scenarios``, and some others, have a table ``BREAKS``: test name prefix → (file, text,
replacement). The breaks are applied to a copy of the tree, never to the tree itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
COPIED = ("orchestrator", "model_pool", "engine", "session_store", "policies", "tests")

Break = tuple[str, str, str, str, str]  # test file, test prefix, file, text, replacement


def all_breaks() -> list[Break]:
    found = []
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        if "\nBREAKS" in path.read_text():
            module = importlib.import_module(f"tests.{path.parent.name}.{path.stem}")
            name = path.relative_to(ROOT).as_posix()
            found += [(name, prefix, *change) for prefix, change in module.BREAKS.items()]
    return found


def is_python(text: str) -> bool:
    try:
        compile(text, "changed", "exec")
    except SyntaxError:
        return False
    return True


def notices(tree: Path, broken: Break) -> str:
    """``red`` when the break turns its test red, else what happened instead."""
    test_file, prefix, name, text, replacement = broken
    path = tree / name
    original = path.read_text()
    if text not in original:
        return f"the text is not in {name}"
    changed = original.replace(text, replacement, 1)
    if name.endswith(".py") and not is_python(changed):
        return f"{name} is not Python then: red would prove nothing"
    path.write_text(changed)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test_file, "-k", prefix],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(original)
    return {0: "STAYED GREEN", 1: "red", 5: "NO SUCH TEST"}.get(ended.returncode, f"pytest said {ended.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only breaks whose test (file::name) contains this")
    only = parser.parse_args().k
    table = Table("TEST", "FILE", "RESULT")
    missed = 0
    breaks = [broken for broken in all_breaks() if only in f"{broken[0]}::{broken[1]}"]
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, tree / name)
        for number, broken in enumerate(breaks, 1):
            result = notices(tree, broken)
            print(f"{number}/{len(breaks)} {broken[1]}: {result}", file=sys.stderr)
            missed += result != "red"
            table.add_row(broken[1], broken[2], result)
    Console().print(table)
    print(f"{len(breaks)} breaks, {missed} not noticed")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
