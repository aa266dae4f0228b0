"""Google's TPUs, through torch-tpu. No run has trained on one yet. The package may be deleted."""
