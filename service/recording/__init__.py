"""From a report to rows in the database: `recorder` and `spool`, behind the experiment's actor."""
