"""From what a caller gave to code that runs."""
