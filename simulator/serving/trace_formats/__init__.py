"""Files of real traffic, one module for each family of formats: a file's own names say which it is.

:func:`.reading.read_requests` is the door; each family says what it matches and gives :class:`.rows.RequestRows`.
"""
