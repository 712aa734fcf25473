"""Scripts for a GPU machine: checks and tuning that end in a table and a JSON file."""
