"""How many blocks run at a time, for decisions that must be the same in a kernel and in select."""

AT_A_TIME = 128  # about as many as a GPU has room for where one fills a multiprocessor
