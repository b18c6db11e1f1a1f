"""What a caller asks for, checked: every mistake of a caller raises here."""
