"""Runs on the host: run directory, supervisor, events, states, locks, and the safe ways to delete and to kill.

Files are the only truth. Standard library alone (plus `backend.errors` and `backend.report`), Python 3.10 and newer:
this package travels in the zipapp and runs before any environment exists.
"""
