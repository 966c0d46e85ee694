"""What the tests of routers share."""

from tests.vllm.conftest import models, module_dir, patient_resets, start_engine

__all__ = ["models", "module_dir", "patient_resets", "start_engine"]
