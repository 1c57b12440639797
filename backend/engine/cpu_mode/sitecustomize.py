"""CPU mode of SGLang, switched on by Python itself in every process of the server (this folder is on its PYTHONPATH).

The unmodified wheel of SGLang 0.5.14 serves small models on a CPU once (1) two absent packages have placeholders,
(2) MLA uses its absorbed form, and (3), for EAGLE-3, its Triton kernels run in Triton's own interpreter with the few
that matter replaced by plain PyTorch. Acts only where SGLANG_USE_CPU_ENGINE=1; no file of SGLang is changed. A missing
operation raises by name. It knows the insides of one version: another SGLang ends here, loudly, since its functions
could silently do nothing.
"""

import importlib.metadata
import os

VERSION = "0.5.14"

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    found = importlib.metadata.version("sglang")
    if found != VERSION:
        # SystemExit: Python only prints other errors of this module, and goes on without the CPU mode.
        raise SystemExit(f"eagle3-console: the CPU mode serves with SGLang {VERSION}, not with {found}")
    import eagle3_cpu_stubs

    # torchvision: imported at module level by sglang/srt/utils/common.py:92. sgl_kernel: a CUDA wheel; without AMX no
    # operation of it is reached for the model families served here.
    eagle3_cpu_stubs.install("torchvision", "sgl_kernel")

    from eagle3_cpu_imports import after_import

    @after_import("sglang.srt.models.deepseek_common.attention_backend_handler")
    def _absorbed_mla(module):
        """torch_native reads keys and values from the latent pool, so only the absorbed form of MLA fits it."""
        module.AttentionBackendRegistry.register("torch_native", lambda attn, batch: module.AttnForwardMethod.MLA)

    if os.environ.get("TRITON_INTERPRET") == "1":
        # Two OpenMP threads on two busy cores spin at barriers: 2.6 s a verify step instead of 0.12 s.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import eagle3_cpu_speculative

        eagle3_cpu_speculative.install()
        if os.environ.get("EAGLE3_CPU_SLOW") != "1":  # 1: everything in the interpreter, as a cross-check
            import eagle3_cpu_attention
            import eagle3_cpu_kernels

            eagle3_cpu_attention.install()
            eagle3_cpu_kernels.install()
