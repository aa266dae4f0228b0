"""The database: engine, tables and migrations; `migrate` is the command line's entry."""
