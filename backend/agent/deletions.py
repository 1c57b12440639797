"""The agent's verbs around deletion: which roots may be deleted under, and taking a purge back.

Deleting itself is the purge stage's; the rules are `backend.runs.deletion`'s. Both verbs are audited.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.errors import UsageError
from backend.runs import allow, deletion
from backend.runs.audit import AuditLog
from backend.runs.layout import Home


def allow_root(home: Home, args: Mapping[str, Any]) -> dict[str, Any]:
    """Put `args["root"]` on the allow list; the console has had it confirmed in typed words.

    Raises:
        Refused: `bad_root`, a root that may never be deleted under.
    """
    root, who = Path(str(args["root"])), str((args.get("operator") or {}).get("who", "unknown"))
    audit = AuditLog(home.create().audit)
    audit.append("allow", "before", who=who, root=str(root))
    listed = allow.add_root(home.allow, root)
    audit.append("allow", "after", who=who, root=str(root))
    return {"roots": [str(entry) for entry in listed.roots]}


def undo(home: Home, args: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the trash of the purge `args["sha"]` back to where it was.

    Raises:
        UsageError: no such trash (`no_trash`); it names what can be undone.
        Refused: something stands in its place now.
    """
    sha, who = str(args["sha"]), str((args.get("operator") or {}).get("who", "unknown"))
    audit = AuditLog(home.audit)
    pending = {trash.plan.sha: trash for trash in deletion.pending_trash(audit)}
    if sha not in pending:
        raise UsageError(
            f"there is no purge {sha!r} to take back",
            fix=f"in trash now: {', '.join(pending) or 'nothing'}",
            reason="no_trash",
        )
    restored = deletion.undo(pending[sha], allow.load(home.allow), audit=audit, who=who)
    return {"path": str(restored)}
