"""Images for a text model (Gemma 3): pixels, the vision tower, soft tokens among a prompt's."""
