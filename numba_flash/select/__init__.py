"""Problem x Target -> which kernel runs, with which Config and which parameters. No CUDA in here."""
