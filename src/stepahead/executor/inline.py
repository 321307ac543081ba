"""The runner in this thread: for tests and debugging."""

from __future__ import annotations
from stepahead.errors import StepFailed

class _F:
    def __init__(self, f): self.f=f
    def land(self):
        return self.f.land()
class InlineExecutor:
    def __init__(self, runner): self._runner = runner
    def launch(self, plan): return _F(self._runner.launch(plan))
    def close(self): self._runner.close()
