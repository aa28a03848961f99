"""Conversations on disk: the state of a sequence, kept from one turn to the next.

Pure: ``_keys`` (which file a key names), ``_history`` (which file a history names), ``_format`` (what is in a file),
``_retention`` (what has to go).  Shells: ``_files`` (whole files, in worker threads), ``_locks`` (other processes),
``_caches`` and ``_turns`` (what operations and programs use).
"""

from __future__ import annotations
