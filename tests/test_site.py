"""The documentation site builds without a warning, from the documents and from the code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; --strict makes each warning (a dead link, a page in no menu) an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in site.glob("*.html")}


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    from opcast.datasets.ops import KINDS
    from opcast.jobs.cli import VERBS

    verbs = (site / "reference" / "verbs.html").read_text()
    ops = (site / "reference" / "ops.html").read_text()
    assert all(f"opcast {verb}" in verbs for verb in VERBS)
    assert all(f'id="{kind}"' in ops for kind in KINDS)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'src="http' not in text
        assert '<link rel="stylesheet" href="http' not in text
