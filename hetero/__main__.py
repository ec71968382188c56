"""``python -m hetero``."""

from __future__ import annotations

import sys

from hetero.cli import main

sys.exit(main())
