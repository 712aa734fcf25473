"""What other programs said once, and what makes them say it again."""
