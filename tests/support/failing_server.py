"""`python failing_server.py PORT MODEL STEPS`: a server whose engine fails at its step number STEPS."""

import sys

from qengine.async_llm import AsyncLLM
from qengine.engine.runner import Runner
from qengine.server.lifecycle import run_server
from qengine.server.settings import ServerSettings

if __name__ == "__main__":
    port, model, steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    launch, taken = Runner.launch, []

    def failing(self, *args, **options):
        taken.append(1)
        if len(taken) == steps:
            raise RuntimeError("the device is gone")
        return launch(self, *args, **options)

    Runner.launch = failing
    llm = AsyncLLM(model, device="cpu", dtype="float32", swap_space=0, max_waiting_requests=None)
    sys.exit(run_server(llm, ServerSettings(port=port)))
