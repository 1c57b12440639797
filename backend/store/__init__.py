"""The hidden-state store: what a target computed for each record, on disk, checksummed, resumable (docs/store.md)."""
