"""Messages to people: `channels` (`webhook`, `mail`) carry them, `courier` delivers what the store holds."""
