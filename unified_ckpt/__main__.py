"""Runs the command line: `python -m unified_ckpt` is the same as `unified-ckpt`."""

from __future__ import annotations

import sys

from unified_ckpt.cli.main import main

sys.exit(main())
