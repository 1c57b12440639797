"""The operator's side: command line, terminal app and links to hosts. Never imports torch, sglang or pynvml."""
