"""The machine: its GPU, its compilers, its folders, its threads."""
