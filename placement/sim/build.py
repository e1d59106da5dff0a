"""Builds the C++ extension of the simulated accelerator, once per user, and loads it.

The built file is kept in a cache directory under a name that is a hash of everything it depends on
(sources, flags, torch, Python), so a change of any of them builds another file and never disturbs a
process that uses the old one.

The compiler is called directly, one call a source file and two at a time. ``torch.utils.
cpp_extension`` would need ninja and setuptools, and its ``load`` also loads what it has built, from
where it was built; here nothing but ``g++`` (or ``$CXX``) and Python's headers has to be installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["SimulatedAcceleratorUnavailable", "cache_directory", "ensure_built", "load"]

_MODULE_NAME = "_placement_sim"
_SOURCES = Path(__file__).parent / "csrc"
_TORCH = Path(torch.__file__).parent
_PARALLEL_JOBS = 2  # a job takes up to 1 GB of memory
_OUTPUT_LINES_SHOWN = 30
_NOTICE = "placement: building the simulated accelerator into {}, once; it takes minutes"

_COMPILE_FLAGS = (
    "-std=c++20",  # what torch's own headers ask for
    "-O1",  # the kernels are torch's; -O2 only makes the build slower
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
    f"-DTORCH_EXTENSION_NAME={_MODULE_NAME}",
    "-DUSE_DISTRIBUTED",
    "-DUSE_C10D_GLOO",
)
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")

_loaded: ModuleType | None = None


class SimulatedAcceleratorUnavailable(RuntimeError):
    """The extension can't be built on this machine; the message says what is missing."""


def cache_directory() -> Path:
    """Where built extensions are kept.

    ``$TORCH_PLACEMENT_CACHE`` if set, else ``torch-placement`` in ``$XDG_CACHE_HOME``, which is
    ``~/.cache`` by default.
    """
    if own := os.environ.get("TORCH_PLACEMENT_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch-placement"


def load() -> ModuleType:
    """Return the extension module, built first if the cache doesn't have it (some minutes).

    Loading it registers nothing with torch.

    Raises:
        SimulatedAcceleratorUnavailable: the extension can't be built.
    """
    global _loaded
    if _loaded is None:
        # c10d's classes must be known to pybind before a function that takes one is bound
        import torch.distributed  # noqa: F401

        path = ensure_built()
        loader = importlib.machinery.ExtensionFileLoader(_MODULE_NAME, str(path))
        spec = importlib.util.spec_from_file_location(_MODULE_NAME, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        _loaded = module
    return _loaded


def ensure_built() -> Path:
    """Return the path of the built extension, building it if the cache doesn't have it.

    Several processes may call this at once, as the ranks of a job do: one builds, the others wait.

    Raises:
        SimulatedAcceleratorUnavailable: the extension can't be built.
    """
    cache = cache_directory()
    target = cache / f"{_MODULE_NAME}-{_cache_key()}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if not target.exists():  # nobody built it while this process waited
            print(_NOTICE.format(cache), file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as build:
                built = _compile_and_link(Path(build))
                os.replace(built, target)  # atomic: no process ever sees half a file
    return target


def _cache_key() -> str:
    digest = hashlib.sha256()
    facts = (torch.__version__, str(torch.version.git_version), sysconfig.get_config_var("SOABI"))
    for fact in (*facts, *_COMPILE_FLAGS, *_LIBRARIES):
        digest.update(f"{fact}\0".encode())
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in {".cpp", ".h"}:
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, even if the process is killed
        yield


def _compile_and_link(directory: Path) -> Path:
    compiler = _find_compiler()
    headers = (
        _TORCH / "include",
        _TORCH / "include" / "torch" / "csrc" / "api" / "include",
        _find_python_headers(),
    )
    includes = [f"-isystem{path}" for path in headers]

    def compile_source(source: Path) -> Path:
        target = directory / f"{source.stem}.o"
        _run([compiler, *_COMPILE_FLAGS, *includes, "-c", str(source), "-o", str(target)])
        return target

    # largest first, so that the two jobs end at about the same time
    sources = sorted(_SOURCES.glob("*.cpp"), key=_compile_cost, reverse=True)
    with ThreadPoolExecutor(_PARALLEL_JOBS) as jobs:
        objects = [str(path) for path in jobs.map(compile_source, sources)]
    target = directory / f"{_MODULE_NAME}.so"
    libraries = [f"-l{name}" for name in _LIBRARIES]
    _run([compiler, "-shared", *objects, f"-L{_TORCH / 'lib'}", *libraries, "-o", str(target)])
    return target


def _compile_cost(source: Path) -> int:
    """A guess at how long a file compiles: what counts is which headers of torch it includes."""
    text = source.read_text()
    heavy = ("autocast_mode.h", "utils/pybind.h", "c10d/Work.hpp", "torch/library.h")
    return sum(header in text for header in heavy[:3]) * 2 + (heavy[3] in text)


def _find_compiler() -> str:
    wanted = os.environ.get("CXX", "g++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise SimulatedAcceleratorUnavailable(
            f"The simulated accelerator is built with a C++ compiler, and {wanted!r} isn't there. "
            "Install one (Debian, Ubuntu: `apt-get install g++`; Fedora: `dnf install gcc-c++`), "
            "or name one in $CXX."
        )
    return compiler


def _find_python_headers() -> Path:
    directory = Path(sysconfig.get_paths()["include"])
    if not (directory / "Python.h").exists():
        raise SimulatedAcceleratorUnavailable(
            "The simulated accelerator is built against Python's C headers, and there is no "
            f"Python.h in {directory}. Install them (Debian, Ubuntu: `apt-get install "
            "python3-dev`; Fedora: `dnf install python3-devel`)."
        )
    return directory


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-_OUTPUT_LINES_SHOWN:])
        raise SimulatedAcceleratorUnavailable(
            f"The simulated accelerator doesn't compile with torch {torch.__version__}. "
            f"`{command[0]}` needs C++20 (g++ 11 or newer). The end of its output:\n{tail}"
        )
