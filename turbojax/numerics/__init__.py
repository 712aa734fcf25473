"""Int8, e4m3 and packed low-bit codes, SAS, `TurboConfig`, and what rounds where."""
