"""``opcast api`` as a program that writes down what it and its processes open and start, and should not.

    python -P watched.py LOG [setting=value …]

Python's audit hooks cannot be taken back, so they are in a process of their own; its children run this file's top level
too, as ``multiprocessing`` has it. LOG gets a line for each event: its name, and what it was about.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig

import numpy.testing  # noqa: F401 - NumPy 1.26 starts lscpu where this is first imported

LOG = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
HERE = os.path.realpath(os.getcwd())
OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))  # opcast's folder
PLACES = (  # that a service reads and writes: Python's, opcast's, its home's and the system's own figures
    *map(os.path.realpath, (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *site.getsitepackages())),
    *map(os.path.realpath, (OWN, os.environ["OPCAST_HOME"], os.environ["TMPDIR"])),
    *("/proc", "/sys", "/dev", "/usr"),
)
FOUND = "pickle.find_class"
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect", FOUND}


def watch(event: str, about: tuple[object, ...]) -> None:
    """Write down a forbidden import, file, program or connection."""
    if event == "import":
        if str(about[0]).partition(".")[0] in NAMES:
            tell(event, about[0])
    elif event in ("open", "os.listdir", "os.scandir") and isinstance(about[0], (str, bytes)):
        place = os.path.abspath(os.fsdecode(about[0]))
        imports = (event == "os.listdir" and place == HERE) or place.endswith("__path_hook__")  # Python's path
        if not imports and (place.startswith(HERE) or not place.startswith(PLACES)):
            tell(event, place)
    elif event in STARTS and not _of_a_pool(event, about):
        tell(event, about)


def _of_a_pool(event: str, about: tuple[object, ...]) -> bool:
    """Whether it is how ``multiprocessing`` sends a question to its process."""
    return event == FOUND and str(about[0]).partition(".")[0] not in NAMES


def tell(event: str, about: object) -> None:
    os.write(LOG, f"{event}\t{about}\n".encode())


NAMES = {name.removesuffix(".py") for name in os.listdir(HERE)} | {"kernels", "timm"}  # nobody has a reason to import
sys.addaudithook(watch)

if __name__ == "__main__":
    from opcast.jobs.cli import main

    sys.exit(main(["api", "port=0", "format=json", *sys.argv[2:]]))
