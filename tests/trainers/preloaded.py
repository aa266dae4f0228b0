"""What the server that workers of a test are forked from has imported: also what a run imports first.

The collector skips it, which each run calls twice.
"""

import gc
import importlib

for module in (
    "cuda_ext.adan_steps",
    "pytest",
    "tests.trainers.tape",
    "trainers.loop.assembly",
    "trainers.profiling",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
):
    importlib.import_module(module)
gc.freeze()
