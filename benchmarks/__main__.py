"""What ``python -m benchmarks`` does: the main one of them."""

from __future__ import annotations

import sys

from benchmarks.engine import main

if __name__ == "__main__":
    sys.exit(main())
