"""The database: engine, tables, statements and migrations; `migrate` is its door for the command line."""
