"""The database: engine, tables, statements and migrations."""
