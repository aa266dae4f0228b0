"""Search algorithms: which runs there are, which end early, and what is suggested next. Pure.

An algorithm is one entry of `SEARCHES` and, if it decides anything differently, one subclass of `Search`. No
code outside its module compares its name.
"""

from service.search.asha import ASHA
from service.search.protocol import SEARCHES, SearchInfo
from service.search.section import GRID, RANDOM, AnySearch, Search
from service.search.tpe import TPE
from trainers.registry import by_name

SEARCHES |= by_name(GRID, RANDOM, ASHA, TPE)
