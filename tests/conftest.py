"""Hypothesis profiles: the same examples every time where CI is set, fresh ones elsewhere."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small forwards; read when torch is imported

from hypothesis import settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
