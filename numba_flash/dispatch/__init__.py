"""The path of a call: from what a caller gave to code that runs."""
