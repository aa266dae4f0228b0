"""Steps from one form of the tables to the next, in `versions`; run by `service.db.migrate`."""
