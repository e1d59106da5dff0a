"""How verl finds the plug-in, and what it says of itself. Each in an interpreter of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed; make test-clients runs this")

ROOT = Path(__file__).parents[2]


def run(program: str, python: str = sys.executable, **environment: str) -> tuple[str, str]:
    """What ``program`` printed, and what it logged."""
    done = subprocess.run(
        [python, "-W", "ignore", "-c", program],
        cwd="/",
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


ENGINES = """
from verl.workers.engine import EngineRegistry
for model_type in ("language_model", "value_model"):
    for backend in ("fsdp", "fsdp2"):
        print(EngineRegistry.get_engine_cls(model_type, backend).__name__)
"""


def test_it_attaches_when_verls_engines_are_imported_and_says_so_once() -> None:
    printed, logged = run("import sys, verl\nassert 'verl.workers.engine' not in sys.modules")
    assert "attached" not in logged
    printed, logged = run(
        f"import verl\n{ENGINES}\nimport verl.workers.engine", VERL_PLATFORM="sim"
    )
    assert printed.split() == ["PlacedEngineWithLMHead"] * 2 + ["PlacedEngineWithValueHead"] * 2
    assert logged.count("torch-placement attached to verl 0.9.1") == 1
    assert "fsdp and fsdp2 engines on sim (sim)" in logged


def test_the_simulated_accelerator_is_a_platform_only_where_it_is_asked_for() -> None:
    device = "import verl\nfrom verl.utils.device import get_device_name\nprint(get_device_name())"
    assert run(f"from placement import sim\nsim.enable()\n{device}")[0].split() == ["sim"]
    assert run(device)[0].split() != ["sim"]


def test_an_unknown_release_of_verl_is_refused_loudly_and_runs_its_own_engines() -> None:
    program = f"""
import verl
from importlib.metadata import entry_points
verl.__version__ = "0.99.0"
(plugin,) = entry_points(group="verl.plugins", name="torch-placement")
try:
    plugin.load()
except Exception as refusal:
    print(type(refusal).__name__)
{ENGINES}
"""
    printed, logged = run(program, VERL_USE_EXTERNAL_PLUGINS="none", VERL_ENGINE_DEVICE="cuda")
    refusal, *engines = printed.split()
    assert refusal == "UnknownClient"
    assert engines == ["FSDPEngineWithLMHead"] * 2 + ["FSDPEngineWithValueHead"] * 2
    assert "attaching to verl refused: verl is 0.99.0" in logged
    assert "0.9.1" in logged


def test_a_key_that_another_plug_in_took_is_not_passed_over_in_silence() -> None:
    program = """
import verl
import verl.workers.engine
from placement.adapters.verl.engine import register_engines
try:
    register_engines()
except Exception as refusal:
    print(type(refusal).__name__)
"""
    printed, _ = run(program, VERL_PLATFORM="sim")
    assert printed.split() == ["ContradictoryOptions"]


def test_a_wheel_beside_verl_is_all_it_takes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for part in ("placement", "engine"):
        shutil.copytree(ROOT / part, source / part)
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    # An environment that has the wheel, and sees what is installed in this one behind it.
    fresh = tmp_path / "environment"
    venv.create(fresh, with_pip=False)
    site = next(fresh.glob("lib/python*/site-packages"))
    (site / "clients.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)

    where = "import verl\nimport placement\nprint(placement.__file__)\n"
    printed, logged = run(
        where + ENGINES, python=str(fresh / "bin" / "python"), VERL_PLATFORM="sim"
    )
    found, *engines = printed.split()
    assert found.startswith(str(site))
    assert set(engines) == {"PlacedEngineWithLMHead", "PlacedEngineWithValueHead"}
    assert "torch-placement attached to verl" in logged
