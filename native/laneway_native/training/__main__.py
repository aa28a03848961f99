"""``python -m laneway_native.training``: the child process."""

from __future__ import annotations

import logging
import os

from laneway_native.training._child import main

if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # The thread that listens cannot be woken, and an interpreter that winds down beside it would abort.
    os._exit(status)
