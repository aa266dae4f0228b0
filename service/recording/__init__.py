"""From a report to rows in the database: `mailbox`, `spool`, `recorder`, and their actor."""
