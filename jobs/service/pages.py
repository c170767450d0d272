"""The web page of the service: one file, made when the service starts, that asks by the service's own calls."""

from __future__ import annotations

from pathlib import Path

from ...simulator import html
from ...simulator.html.colours import PALETTE

HERE = Path(__file__).resolve().parent / "page"
TABS = (
    ("op", "Operator"),
    ("step", "Step"),
    ("job", "Job"),
    ("serving", "Serving"),
    ("search", "Search"),
    ("ways", "Search serving"),
    ("fabric", "Fabric"),
    ("compare", "Compare"),
    ("known", "Predictors"),
)


def index() -> str:
    """The page as HTML, its styles (those of reports, and its own) and its script inside."""
    import jinja2
    from markupsafe import Markup

    reports = Path(html.__file__).resolve().parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template("index.html.j2").render(
        tabs=TABS,
        light={name: light for name, (light, _) in PALETTE.items()},
        dark={name: dark for name, (_, dark) in PALETTE.items()},
        report_style=Markup((reports / "report.css").read_text(encoding="utf-8")),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
    )
