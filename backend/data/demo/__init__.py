"""The embedded demo's data: its target, its prompts, the target's own answers and the three source files.

Everything here is made from packages of the package index (named in `NOTICE`) and from `answers.jsonl`, which holds the
target's answers beside the content ids of prompts that stay in their packages.
"""
