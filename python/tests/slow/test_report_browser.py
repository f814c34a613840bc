"""Snakemake's report in a real browser: it opens offline, without an error, and shows what it says.

Set PACKEDCONV_REPORT to a report that is there, to look at that one instead of a small one.
"""

import os
import pathlib
import shutil
import time

import browser
import pytest
from checkout import Checkout

ROOT = pathlib.Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    browser.program() is None,
    reason=f"no browser: expected one of {', '.join(browser.PROGRAMS)} in PATH, found none;"
    " install it with: apt-get install chromium",
)

# Everywhere; what `all` makes without a GPU.
FIRST = ["1 Claims and audit", "2 Figures of the paper", "3 Tables of the paper", "4 This device"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report that was written without a network where that can be arranged."""
    given = os.environ.get("PACKEDCONV_REPORT")
    if given:
        return pathlib.Path(given)
    checkout = Checkout(tmp_path_factory.mktemp("report") / "packedconv")
    shutil.copytree(ROOT / "docs", checkout.folder / "docs")
    made = checkout.run("all")
    assert made.returncode == 0, made.stdout
    written = checkout.run("--report", "report.html")
    assert written.returncode == 0, written.stdout
    return checkout.folder / "report.html"


@pytest.fixture
def page(report, tmp_path):
    """The report, opened at a laptop's width with the network off."""
    with browser.Browser(tmp_path) as chromium:
        chromium.open(report)
        chromium.until("document.querySelector('nav') !== null")
        yield chromium
        assert chromium.errors() == []
        asked = [url for url in chromium.requests() if not url.startswith(("data:", "blob:"))]
        assert asked == [report.resolve().as_uri()]


def keys(page, expression):
    return page.evaluate(f"Object.keys({expression})")


def menu(page):
    """The text of the entries on the left, in the order in which they are shown."""
    return page.evaluate("[...document.querySelectorAll('nav li')].map((e) => e.textContent)")


def show(page, category):
    """Go to a category, from wherever the page is."""
    page.evaluate("app.setView({navbarMode: 'menu', category: undefined, subcategory: undefined})")
    page.click("nav li a", category)


def looks(page, tmp_path, name):
    """Keep a picture of the page, for eyes."""
    folder = pathlib.Path(os.environ.get("PACKEDCONV_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    time.sleep(0.3)  # the side bar slides
    page.screenshot(folder / f"{name}.png")


def test_the_first_page_names_the_authors_and_the_machine(page, tmp_path):
    page.until("document.querySelector('#rulegraph svg, #rulegraph canvas') !== null")
    text = page.evaluate("document.querySelector('.prose').innerText")
    for part in ("independent implementation", "K. Tuteja", "arXiv:2611.17212v1", "processor"):
        assert part in text
    # The top is in sight: a page that is higher than the window begins with its title.
    assert page.evaluate("document.querySelector('.prose').getBoundingClientRect().top") >= 0
    looks(page, tmp_path, "first")


def test_categories_are_in_order(page):
    shown = [entry for entry in menu(page) if entry[:1].isdigit()]
    assert shown[:4] == FIRST
    assert shown == sorted(shown)
    assert len(shown) == len(keys(page, "categories"))


def test_every_category_lists_its_results_and_opens_each(page, tmp_path):
    """Every eye is clicked; a figure is a picture with pixels, a table a page with rows."""
    opened = 0
    for category in keys(page, "categories"):
        for subcategory in keys(page, f"categories[{category!r}]"):
            show(page, category)
            if len(keys(page, f"categories[{category!r}]")) > 1:
                page.click("nav li a", subcategory)
            paths = page.evaluate(f"categories[{category!r}][{subcategory!r}]")
            page.until(f"document.querySelectorAll('nav tbody tr').length == {len(paths)}")
            for row in range(len(paths)):
                page.evaluate(
                    f"document.querySelectorAll('nav tbody tr')[{row}].querySelector('a').click()"
                )
                path = page.evaluate("app.state.resultPath")
                if path.endswith(".png"):
                    page.until(
                        "document.querySelector('#app img[src^=\"data:image/png\"]')"
                        "?.naturalWidth > 100"
                    )
                    # In sight as a whole, beside the list.
                    assert page.evaluate(
                        "document.querySelector('#app img[src^=\"data:image/png\"]')"
                        ".getBoundingClientRect().right <= innerWidth"
                    ), path
                else:
                    assert path.endswith(".html"), path
                    page.until("document.querySelector('#app iframe')?.src.startsWith('data:')")
                opened += 1
            looks(page, tmp_path, category.replace(" ", "-"))
    assert opened == len(keys(page, "results"))


def test_captions_say_what_is_printed_and_what_was_obtained(page, tmp_path):
    for path in keys(page, "results"):
        caption = page.evaluate(f"results[{path!r}].caption")
        assert "What to expect." in caption, path
        # docutils writes its complaints into the text.
        assert "system-message" not in caption, path
        assert "problematic" not in caption, path
    show(page, FIRST[1])
    page.click("nav tbody tr td", "Fig. 5a, speedup, A100")
    path = page.evaluate(
        "Object.keys(results).find((key) => results[key].labels.result.startsWith('Fig. 5a'))"
    )
    page.evaluate(f"app.showResultInfo({path!r})")
    page.until("document.querySelector('nav .prose table') !== null")
    text = page.evaluate("document.querySelector('nav .prose').innerText")
    for part in ("PRINTED BESIDE OBTAINED", "1.65×", "± 10 %", "not testable here"):
        assert part.lower() in text.lower()
    looks(page, tmp_path, "caption")


def test_a_table_is_readable(page, tmp_path):
    show(page, FIRST[0])
    page.evaluate("document.querySelectorAll('nav tbody tr')[0].querySelector('a').click()")
    page.until("document.querySelector('#app iframe') !== null")
    path = page.evaluate("app.state.resultPath")
    text = page.evaluate(
        f"new TextDecoder().decode(Uint8Array.from(atob(results[{path!r}].data_uri.split(',')[1]),"
        " (c) => c.charCodeAt(0)))"
    )
    assert path.endswith("claims.html")
    assert "a100.speedup.maximum" in text.replace("<wbr>", "")
    assert "1.65×" in text
    looks(page, tmp_path, "claims")


def test_statistics_and_rules_open(page):
    page.click("nav li a", "Statistics")
    page.until("document.querySelector('#runtimes svg, #runtimes canvas') !== null")
    page.click("nav li a", "Workflow")
    page.until("document.querySelector('#rulegraph svg, #rulegraph canvas') !== null")
