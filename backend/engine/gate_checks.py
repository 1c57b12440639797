"""The gate's single checks: each takes what was seen and answers with a `Check` that carries its evidence.

Owns what must hold for a server to be believed, and the fix for each failure. Pure functions of values read elsewhere
(`/server_info`, live markers, listeners, log lines): no network, no waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from backend.engine.capture import LiveMarker
from backend.engine.client import Reply
from backend.engine.procfs import Listener
from backend.engine.readiness import ListenerFacts, ServerProcess
from backend.report import Check

MIN_PROOF_TOKENS = 8
_ABSENT = "(not reported)"


def port_was_closed(server: ServerProcess, port: int, now: ListenerFacts | None) -> Check:
    """Nobody listened on the port immediately before the launch: else a green /health may be the old server's."""
    if server.port_was_closed:
        return Check("port_closed", True, f"nobody listened on port {port} before the launch")
    who = f"; now it is {now}" if now else ""
    return Check(
        "port_closed",
        False,
        f"port {port} was already answering before the launch{who}",
        fix="run the stop stage to end the old server, then launch again",
    )


def listener_is_ours(listeners: Sequence[Listener], tree: Collection[int], facts: ListenerFacts | None) -> Check:
    """Every socket that can answer on our address belongs to a process of our tree."""
    foreign = [listener for listener in listeners if not set(listener.pids) & set(tree)]
    if listeners and not foreign:
        where = ", ".join(f"{listener.address}:{listener.port}" for listener in listeners)
        pids = sorted({pid for listener in listeners for pid in listener.pids})
        return Check(
            "listener", True, f"{where} belongs to pid {', '.join(map(str, pids))} of our tree", {"pids": pids}
        )
    if not listeners:
        return Check(
            "listener",
            False,
            "/health answered, but nobody listens in this network namespace",
            fix="the server runs in another container or behind a proxy: run the gate where the server runs",
        )
    if facts is None:
        evidence = f"a process of uid {foreign[0].uid} that we may not inspect answers on {foreign[0].address}"
    else:
        evidence = f"not our server answers on {foreign[0].address}:{foreign[0].port}: {facts}"
    return Check(
        "listener",
        False,
        evidence,
        {"pid": facts.pid if facts else None},
        "end that process (the stop stage ends ours), then launch again",
    )


def launch_id_matches(model_info: Mapping[str, Any], launch_id: str) -> Check:
    """The server says the random id of our launch (`--weight-version`)."""
    found = model_info.get("weight_version", _ABSENT)
    return Check(
        "launch_id",
        found == launch_id,
        f"weight_version is {found}" + ("" if found == launch_id else f", our launch is {launch_id}"),
        {"found": found, "wanted": launch_id},
        fix="another launch answers on this port: run the stop stage, then launch again",
    )


def flags_match(info: Mapping[str, Any], expected: Mapping[str, Any]) -> Check:
    """Every flag that we asked for is what the server resolved; dotted names reach into nested objects.

    For a capturing server `expected` holds what capture needs: graphs disabled in decode and prefill (a replayed graph
    runs no Python), no radix cache, two-batch overlap off, one pipeline stage.
    """
    wrong = [
        f"{name} is {reported(info, name)!r}, asked {wanted!r}"
        for name, wanted in expected.items()
        if not same_value(reported(info, name), wanted)
    ]
    return Check(
        "flags",
        not wrong,
        "; ".join(wrong) if wrong else f"all {len(expected)} as asked: {', '.join(expected)}",
        {"expected": dict(expected)},
        fix="SGLang resolved it differently for this model or version: read the server's log, then change [server]",
    )


def reported(info: Mapping[str, Any], name: str) -> Any:
    """The value under a dotted name, or a word that equals nothing where it is not there."""
    found: Any = info
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _ABSENT
        found = found[part]
    return found


def same_value(found: Any, wanted: Any) -> bool:
    """Equality of JSON values: True is not 1, but 0.10 is 0.1."""
    if isinstance(wanted, bool) or isinstance(found, bool) or wanted is None:
        return found is wanted
    return bool(found == wanted)


def generates(reply: Reply, launch_id: str) -> Check:
    """A real answer, and from the launch that we mean."""
    ok = reply.completion_tokens > 0 and reply.weight_version == launch_id
    return Check(
        "generates",
        ok,
        f"{reply.completion_tokens} token(s) for {reply.prompt_tokens}, from launch {reply.weight_version}",
        fix="the HTTP side lives but the scheduler does not: save the log, stop the server, launch again",
    )


def capture_is_live(
    markers: Sequence[LiveMarker],
    lost: Sequence[str],
    *,
    tree: Mapping[int, int],
    launch_id: str,
    layers: Sequence[int],
    sha256: str,
) -> Check:
    """The capture runs inside our processes. `tree` maps the pids of our server to their start ticks.

    SGLang only logs a hook that it cannot apply and goes on, healthy: so the log must not say it, and the marker must
    say that a real forward pass went through the sink.
    """
    ours = [marker for marker in markers if marker.launch_id == launch_id]
    wrong = list(lost) or ([] if ours else [f"no live marker of launch {launch_id} ({len(markers)} of others)"])
    for marker in ours:
        seen = {
            f"pid {marker.pid} is not of our server": tree.get(marker.pid) != marker.start_ticks,
            f"route is {marker.route}": marker.route != "plugin",
            f"layers are {list(marker.layers)}, asked {list(layers)}": list(marker.layers) != list(layers),
            f"the running {marker.file} has sha256 {marker.sha256[:12]}, not {sha256[:12]}": marker.sha256 != sha256,
            "no forward pass has gone through the sink": not marker.sink_hooked,
        }
        wrong += [text for text, is_wrong in seen.items() if is_wrong]
    return Check(
        "capture_live",
        not wrong,
        "; ".join(wrong)
        or f"plugin {sha256[:12]} captures {list(layers)} in pid {', '.join(str(m.pid) for m in ours)}",
        {"pids": [marker.pid for marker in ours], "sha256": sha256},
        fix="the plugin does not fit this SGLang, or is not the one on disk: run the patch stage, then launch again",
    )


def speculation(replies: Sequence[Reply]) -> Check:
    """The server really drafts: verify steps are counted on its own output."""
    steps = sum(reply.spec_verify_ct or 0 for reply in replies)
    tokens = sum(reply.completion_tokens for reply in replies)
    silent = sum(1 for reply in replies if not reply.spec_verify_ct)
    if not replies or silent or tokens < MIN_PROOF_TOKENS:
        evidence = f"{silent} of {len(replies)} answers ({tokens} tokens) were made without a verify step"
        return Check(
            "speculation",
            False,
            evidence,
            {"tokens": tokens, "verify_steps": steps},
            "the server runs without its draft: look for speculative_algorithm in /server_info and in the log",
        )
    return Check(
        "speculation",
        True,
        f"{tokens} tokens in {steps} verify steps: accept length {tokens / steps:.2f}",
        {"tokens": tokens, "verify_steps": steps, "accept_length": tokens / steps},
    )
