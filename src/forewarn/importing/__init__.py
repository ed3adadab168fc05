"""Runs that forewarn did not watch: reads the logs of other tools and writes them as ordinary runs."""

from __future__ import annotations

from forewarn.importing.imported_run import ImportedRun, import_log
from forewarn.importing.log import Log, LogError
from forewarn.importing.log_finder import FoundLog, find_logs

__all__ = ["FoundLog", "ImportedRun", "Log", "LogError", "find_logs", "import_log"]
