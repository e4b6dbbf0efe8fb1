"""One profile for every property: the same examples on every machine, and no clock."""

from hypothesis import settings

settings.register_profile("attemper", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("attemper")
