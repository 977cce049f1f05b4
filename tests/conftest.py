"""Settings for every test: hypothesis without deadlines (machines are shared), and nothing left behind in the checkout."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
