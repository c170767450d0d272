"""Reports as web pages: one HTML file each, which needs no network and no server.

Each kind of report has a module whose ``page`` makes a :class:`.page.Page` of it: :mod:`.quickstart` shows predicted
beside measured, :mod:`.step` one simulated step, :mod:`.network` transfers on the links of a cluster, :mod:`.serving`
served traffic, :mod:`.traces` a recorded run; a search has its page in :mod:`..search.view`. ``write`` makes a file of
a page, ``render`` a text, ``render_body`` a text without its frame, for a page that has styles and scripts already.
"""

from .cluster import ClusterView
from .page import ReportError, render, render_body, write

__all__ = ["ClusterView", "ReportError", "render", "render_body", "write"]
