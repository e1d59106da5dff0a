"""Building and enabling: once a user, safe for many processes, and clear where it can't be done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from placement import sim
from placement.sim import build


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_builds_and_registers_nothing(tmp_path: Path) -> None:
    code = (
        "import torch, placement.sim as sim\n"
        "assert not sim.is_enabled()\n"
        "assert not hasattr(torch, 'sim')\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
        "try: sim.counters()\n"
        "except RuntimeError as error: assert 'call placement.sim.enable() first' in str(error)\n"
        "else: raise AssertionError('counters() worked')\n"
    )
    done = run_python(code, TORCH_PLACEMENT_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_enabling_twice_changes_nothing() -> None:
    assert sim.is_enabled()
    module = torch.sim
    sim.enable(devices=3)
    assert torch.sim is module
    assert torch.sim.device_count() == 8


def test_enabling_is_refused_where_the_device_name_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sim, "_enabled", False)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "other")
    with pytest.raises(RuntimeError, match="uses for 'other': use another process"):
        sim.enable()


def test_enabling_is_refused_beside_a_real_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "_enabled", False)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"has a real accelerator \(cuda\)"):
        sim.enable()


@pytest.mark.parametrize("devices", [0, 17])
def test_the_number_of_devices_is_limited(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "_enabled", False)
    with pytest.raises(ValueError, match="between 1 and 16 devices"):
        sim.enable(devices)


def test_without_a_compiler_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_PLACEMENT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(sim.SimulatedAcceleratorUnavailable, match=r"apt-get install g\+\+"):
        build.ensure_built()


def test_a_failed_build_shows_the_compilers_words_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: the flux is off'; exit 1\n")
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCH_PLACEMENT_CACHE", str(cache))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(sim.SimulatedAcceleratorUnavailable) as error:
        build.ensure_built()
    assert "fatal error: the flux is off" in str(error.value)
    assert "needs C++20" in str(error.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_several_processes_that_start_at_once_build_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for the processes: the lock is one of open files, not of processes."""
    builds = []

    def slow_build(directory: Path) -> Path:
        builds.append(directory)
        time.sleep(0.2)
        result = directory / "result.so"
        result.write_text("built")
        return result

    monkeypatch.setenv("TORCH_PLACEMENT_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_compile_and_link", slow_build)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.ensure_built().read_text()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["built"] * 4
    assert len(builds) == 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".so", ".lock"}


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_PLACEMENT_CACHE", "/somewhere")
    assert build.cache_directory() == Path("/somewhere")
    monkeypatch.delenv("TORCH_PLACEMENT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert build.cache_directory() == Path("/caches/torch-placement")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_directory() == Path.home() / ".cache" / "torch-placement"


def test_a_change_of_the_flags_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._cache_key()
    monkeypatch.setattr(build, "_COMPILE_FLAGS", (*build._COMPILE_FLAGS, "-O2"))
    assert build._cache_key() != before


def test_a_built_extension_is_found_without_a_build() -> None:
    code = (
        "import time, torch.distributed\nfrom placement.sim import build\n"
        "start = time.perf_counter(); build.load(); print(time.perf_counter() - start)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5  # a build takes a hundred times this
