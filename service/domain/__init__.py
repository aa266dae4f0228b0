"""What the rest of the service speaks of: states, records, events, figures and the ledger. Pure."""
