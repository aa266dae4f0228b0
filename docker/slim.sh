#!/bin/sh
# Keeps the image for CPUs below 2 GB, in the layer that installs: no other packages' tests and jars, and no bytecode,
# which each container then writes once below its home instead.
set -e
[ "$1" = cpu ] || exit 0
cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
rm -rf torch/test torch/bin/test_* pandas/tests pyarrow/tests ray/jars
find . -name __pycache__ -prune -exec rm -rf {} +
# pip writes there too, once the line below is there; the home must be made with its user.
rm -rf /home/stillhouse
echo 'import sys; sys.pycache_prefix = "/home/stillhouse/.cache/python"' > bytecode.pth
