"""From a report to rows in the database: `mailbox`, `spool`, `recorder`, and the actor that has them."""
