"""The documentation's site, opened from the disk: complete without a network, legible on a phone, searchable."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import Open

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
PAGES = (
    "index",
    "tutorial",
    "interpretation",
    "metrics",
    "metrics/distributions",
    "reference/compare",
    "project/architecture",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_for_nothing_and_fits_its_window(
    name: str, width: int, dark: bool, site: Path, open_page: Open
) -> None:
    visit = open_page(site / f"{name}.html", dark=dark, width=width)
    visit.page.wait_for_selector("article h1")
    assert visit("document.documentElement.scrollWidth - innerWidth") <= 0
    assert visit("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    assert visit("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
    assert visit.faults == []


def test_search_works_in_pages_that_are_opened_from_the_disk(site: Path, open_page: Open) -> None:
    visit = open_page(site / "reference" / "compare.html")
    visit.page.click(".md-search__input")
    # Without a hyphen: a query that ends with one, while it is typed, is a fault to the search of the site's theme
    visit.page.keyboard.type("bootstrap interval")
    found = visit.page.locator(".md-search-result__link").first
    found.wait_for()
    links = [link.get_attribute("href") for link in visit.page.locator(".md-search-result__link").all()]
    assert any("metrics/statistics.html" in link for link in links)
    assert visit.faults == []
