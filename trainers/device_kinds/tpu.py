"""Google's TPUs: in the catalogue for comparison."""

from __future__ import annotations

from trainers.device_kinds.kind import DeviceKind

TPU = DeviceKind(name="tpu", summary="a TPU chip", noun="TPU", torch_type="xla", load=None, link_gb_s=25.0)
