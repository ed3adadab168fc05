"""Tests with the real training libraries; nothing is downloaded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
