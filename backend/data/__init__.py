"""The data layer: from files that people have to tokens and loss spans.

`sources` (files, containers, formats) -> `records` (normal form, content ids) -> `chat` (template, spans) -> `merge`
(dedup, split, books) -> `merged` (the format on disk). `demo` holds the embedded demo's data. Each module's docstring
says what it owns; docs/data.md says how to use and extend it.
"""
