"""``python -m auto_deploy_ext``: the command line."""

from __future__ import annotations

import sys

from .commands.cli import main

sys.exit(main())
