"""SGLang plugin: what the engine's own EAGLE-3 capture produces, written to files. No SGLang file is changed.

Loaded through the entry-point group `sglang.srt.plugins` (SGLang 0.5.11 and later) in the engine's processes; this
folder on PYTHONPATH is enough. Off unless SGLANG_HS_DUMP_DIR is set. It only *sinks* the states that SGLang gathers
for a draft: inside the layer loop residual adds and all-reduces are deferred, so a dump there would be wrong.

Environment: SGLANG_HS_DUMP_DIR, SGLANG_HS_DUMP_LAYERS (canonical ids "2,15,27": input of layer c; empty = EAGLE-3's
default), EAGLE3_LAUNCH_ID. Files: `<rid>.safetensors`, `<rid>.error.json`, `_live.<pid>.json`, each by rename. Their
reader is backend/engine/capture.py; this module imports nothing of that project.

Three hooks. A hook whose target is gone is only logged by SGLang, so the live marker is written again by the sink
(`sink_hooked`), and the operator's gate compares real outputs besides. A request that cannot be captured whole leaves
an error note, never a short row; nothing that goes wrong in here ends the server or changes what it answers.

Legend: T rows of one chunk or request, C captured width (layers x hidden), H hidden size.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from pathlib import Path

import torch

logger = logging.getLogger("eagle3_capture")

DUMP_DIR = os.environ.get("SGLANG_HS_DUMP_DIR", "")
LAYERS = os.environ.get("SGLANG_HS_DUMP_LAYERS", "")
LAUNCH_ID = os.environ.get("EAGLE3_LAUNCH_ID", "")
BOUNDARIES_RID = "eagle3-boundaries-"
SKIPPED_RID = "HEALTH_CHECK"  # /health generates a token of its own
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
MOST_HELD = 16  # requests half prefilled; the engine chunks one at a time, so more of them were abandoned by clients

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"


def register():
    """Entry point: called by SGLang in each of its processes before the model is made."""
    if not DUMP_DIR:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LOAD_MODEL, _after_load, HookType.AFTER)
    HookRegistry.register(FORWARD, _around_forward, HookType.AROUND)
    HookRegistry.register(LOGITS, _around_logits, HookType.AROUND)


class _Capture:
    """State of this process's capture: the layers, the body whose list decides them, and requests half prefilled."""

    def __init__(self, body, layers, depth):
        self.body = body
        self.layers = layers
        self.depth = depth
        self.parts = {}
        self.announced = False
        self.everywhere = False
        self.boundary_0 = None

    @contextlib.contextmanager
    def at_all_boundaries(self):
        """Capture every boundary for the length of one forward pass.

        Boundary 0 is taken before the first layer by a hook of its own: some models (llama.py) add the residual to
        what they capture, and there is none yet.
        """
        hook = self.body.layers[0].register_forward_pre_hook(self._keep_boundary_0, with_kwargs=True)
        self.body.layers_to_capture = list(range(1, self.depth))
        self.everywhere = True
        try:
            yield
        finally:
            hook.remove()
            self.body.layers_to_capture = list(self.layers)
            self.everywhere = False
            self.boundary_0 = None

    def wanted(self):
        """Canonical ids that this forward pass must yield."""
        return list(range(self.depth)) if self.everywhere else self.layers

    def _keep_boundary_0(self, layer, args, kwargs):
        """The layer's first floating-point argument is its input; a model that differs fails by its width later."""
        states = [x for x in (*args, *kwargs.values()) if torch.is_tensor(x) and x.is_floating_point()]
        self.boundary_0 = states[0].detach().clone() if states else None


_capture = None


def _after_load(result, runner, *args, **kwargs):
    """Switch SGLang's capture on in the target's runner."""
    global _capture
    if runner.server_args.speculative_algorithm is not None:
        # The sink keeps the states from the logits processor, where a draft needs them: it would draft from nothing.
        raise RuntimeError("eagle3_capture: SGLANG_HS_DUMP_DIR is set, but this server speculates; it cannot do both")
    model = getattr(runner.model, "language_model", runner.model)
    depth = model.config.num_hidden_layers
    layers = [int(layer) for layer in LAYERS.split(",")] if LAYERS else [2, depth // 2, depth - 3]
    model.set_eagle3_layers_to_capture(None)  # raises where the model has no EAGLE-3 capture: that is wanted
    _capture = _Capture(model.model, layers, depth)
    model.model.layers_to_capture = list(layers)  # canonical, whatever the model's own "+1" rule
    _write_marker(sink_hooked=False)


def _around_forward(original, runner, forward_batch, *args, **kwargs):
    """A canary request alone in its batch is captured at every boundary."""
    rids = getattr(forward_batch, "rids", None) or []
    alone = _capture is not None and len(rids) == 1 and rids[0].startswith(BOUNDARIES_RID)
    with _capture.at_all_boundaries() if alone else contextlib.nullcontext():
        return original(runner, forward_batch, *args, **kwargs)


def _around_logits(original, self, input_ids, hidden_states, lm_head, batch, aux_hidden_states=None, *args, **kwargs):
    """The post-norm states, the aux states and the batch meet here in every model; the server's output stays as is."""
    if aux_hidden_states is not None and _capture is not None and getattr(batch, "rids", None):
        if not _capture.announced:
            _capture.announced = True
            _write_marker(sink_hooked=True)
        _sink(batch, hidden_states, aux_hidden_states)
    return original(self, input_ids, hidden_states, lm_head, batch, None, *args, **kwargs)


def _sink(batch, last_TH, aux):
    """Slice a prefill batch into its requests; write each request whose last chunk this was."""
    mode = batch.forward_mode
    if not mode.is_extend() or mode.is_target_verify() or _attention_tp_rank() != 0:
        return
    aux = [aux] if torch.is_tensor(aux) else list(aux)  # one packed tensor from SGLang 0.5.23 on
    if _capture.boundary_0 is not None:
        aux.insert(0, _capture.boundary_0)
    aux_TC = torch.cat(aux, dim=-1)
    width = last_TH.shape[1] * len(_capture.wanted())
    lengths = batch.orig_seq_lens.tolist()
    row = 0
    for i, rid in enumerate(batch.rids):
        rows = slice(row, row + int(batch.extend_seq_lens_cpu[i]))
        row = rows.stop
        if rid.startswith(SKIPPED_RID):
            continue
        if not FILE_NAME.fullmatch(rid):
            logger.error("eagle3_capture: %r cannot name a file: not captured", rid)
            continue
        if rid.startswith(BOUNDARIES_RID) and not _capture.everywhere:
            _fail(rid, "not_alone", f"shared a batch with {len(batch.rids) - 1} other requests")
            continue
        if aux_TC.shape[1] != width:
            _fail(rid, "wrong_width", f"{aux_TC.shape[1]} columns captured, {width} wanted")
            continue
        chunk = (batch.input_ids[rows], aux_TC[rows], last_TH[rows])
        _add_chunk(rid, int(batch.extend_prefix_lens_cpu[i]), lengths[i], chunk)


def _add_chunk(rid, prefix, length, chunk):
    """Join chunks by prefix length: any other prefix is a radix-cache hit or a retraction, and an error."""
    parts = _capture.parts.get(rid, [])
    held = sum(len(part[0]) for part in parts)
    if prefix == 0 and parts:
        parts, held = [], 0  # the engine took the request back and prefills it again from the start
    if prefix != held:
        _fail(rid, "prefix_mismatch", f"a chunk starts at {prefix}, but {held} rows are held")
        return
    # The engine reuses these buffers, on a CPU even in place: copy before anything else runs.
    parts = [*parts, tuple(tensor.detach().to("cpu", copy=True) for tensor in chunk)]
    _capture.parts.pop(rid, None)
    if held + len(chunk[0]) == length:
        _write_dump(rid, parts)
        return
    _capture.parts[rid] = parts
    if len(_capture.parts) > MOST_HELD:
        oldest = next(iter(_capture.parts))
        _fail(oldest, "abandoned", f"its prompt was not prefilled to the end while {MOST_HELD} others began")


def _write_dump(rid, parts):
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    input_ids_T, aux_TC, last_TH = (torch.cat(tensors).contiguous() for tensors in zip(*parts, strict=True))
    tensors = {"input_ids": input_ids_T.to(torch.int64), "aux_hidden_state": aux_TC, "hidden_state": last_TH}
    metadata = {
        "rid": rid,
        "layers": ",".join(map(str, _capture.wanted())),
        "launch_id": LAUNCH_ID,
        "post_norm": "true",
        "chunks": str(len(parts)),
    }
    final = Path(DUMP_DIR) / f"{rid}.safetensors"
    scratch = Path(DUMP_DIR) / f"{rid}.tmp"
    try:
        save_file(tensors, scratch, metadata=metadata)
        _error_note(rid).unlink(missing_ok=True)  # of an earlier try under the same id
        scratch.rename(final)
    except (OSError, SafetensorError) as error:  # a full folder costs this request its rows, not the server its life
        scratch.unlink(missing_ok=True)
        _fail(rid, "write_failed", str(error))


def _fail(rid, reason, detail):
    """Forget what is held of a request and say why; the log has it even where the note cannot be written."""
    _capture.parts.pop(rid, None)
    logger.error("eagle3_capture %s: %s: %s", rid, reason, detail)
    try:
        _write_json(_error_note(rid), {"rid": rid, "reason": reason, "detail": detail})
    except OSError as error:
        logger.error("eagle3_capture %s: its error note cannot be written: %s", rid, error)


def _error_note(rid):
    return Path(DUMP_DIR) / f"{rid}.error.json"


def _write_marker(sink_hooked):
    """Proof of life: who captures what, with which file. Written when the capture is on, again when the sink is."""
    import sglang

    if _attention_tp_rank() != 0:
        return
    source = Path(__file__)
    _write_json(
        Path(DUMP_DIR) / f"_live.{os.getpid()}.json",
        {
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "start_ticks": int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]),
            "time": time.time(),
            "route": "plugin",
            "launch_id": LAUNCH_ID,
            "layers": list(_capture.layers),
            "file": str(source),
            "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            "sglang": sglang.__version__,
            "tp_rank": _attention_tp_rank(),
            "sink_hooked": sink_hooked,
        },
    )


def _write_json(path, data):
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(data))
    scratch.rename(path)


def _attention_tp_rank():
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        from sglang.srt.layers.dp_attention import get_attention_tp_rank

        return get_attention_tp_rank()
    return get_parallel().attn_tp_rank
