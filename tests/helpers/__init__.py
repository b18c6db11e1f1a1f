"""What tests of several tiers use, and that tests nothing itself."""
