"""Telling people: channels that carry messages, and the courier that delivers them.

`channels` has one entry per channel, `webhook` and `mail` are those there are, and `courier` sends what the
store holds for subscribers. What is told, and that it is told once, is up to `service.store.noticing`.
"""
