"""What is asked, checked: every mistake of a caller raises in here."""
