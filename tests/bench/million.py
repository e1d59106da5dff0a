"""``placement show`` on a million events: ``make bench``. Prints seconds and peak memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from placement.trace import EventKind, Trace

EVENTS = 1_000_000


def write_trace(directory: Path) -> Path:
    """A trace of ``EVENTS`` events: one real event, written again with other numbers and times."""
    trace = Trace()
    trace.record(
        module="FSDPModel#0",
        component="params",
        kind=EventKind.TRIGGER,
        name="onload",
        source="cpu_manual",
        dest="gpu",
        bytes_to_device=1_000_000,
        seconds=0.001,
        device_bytes=(0, 1_000_000),
        host_bytes=(2_000_000, 2_000_000),
        call_site="/somewhere/engine/fsdp_engine.py:120",
    )
    path = trace.write(directory)
    header, line = path.read_text(encoding="utf-8").splitlines()
    event = json.loads(line)
    wall, monotonic = event["wall"], event["monotonic"]
    with path.open("w", encoding="utf-8") as out:
        out.write(header + "\n")
        for number in range(EVENTS):
            event |= {
                "number": number,
                "wall": wall + number * 1e-3,
                "monotonic": monotonic + number * 1e-3,
            }
            out.write(json.dumps(event, separators=(",", ":")) + "\n")
    return path


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = write_trace(Path(scratch))
        started = time.perf_counter()
        command = [sys.executable, "-m", "placement", "show", str(path)]
        shown = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.count(b"\n")
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
        print(f"placement show: {shown:,} lines of {EVENTS:,} events in {seconds:.1f} s")
        print(f"peak memory of the command {peak:.0f} MB")


if __name__ == "__main__":
    main()
