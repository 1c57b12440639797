"""`init`: write a built-in profile as a commented config file to start from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from backend.errors import Exit, OperatorError, UsageError
from backend.resolve import profile_text


def run(args: argparse.Namespace) -> int:
    """Write the file; never over an existing one.

    Raises:
        UsageError: the file exists (reason ``file_exists``), or there is no such profile.
    """
    path = Path(args.path)
    text = profile_text(args.profile)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{path} exists already and is left as it is",
            fix="name another file: eagle3-console init PATH",
            reason="file_exists",
        ) from None
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}", code=Exit.USAGE) from error
    print(path)
    print(f"next: edit {path}, then `eagle3-console --config {path} plan`", file=sys.stderr)
    return Exit.OK
