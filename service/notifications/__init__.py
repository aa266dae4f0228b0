"""Messages to people: `webhook` and `mail` carry them, `courier` delivers what the store holds."""
