"""Vocabulary of the whole service: states, records, events, figures and the ledger. Pure."""
