"""``opcast api``: the HTTP service over the same requests as the command line and Python."""
