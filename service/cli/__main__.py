"""`python -m service.cli` is `stillhouse`."""

from service.cli import main

main()
