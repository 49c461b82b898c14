"""A program that looks at runs in Chromium, as a person would: `look.py CHROMIUM ADDRESS RUN`.

It runs in an environment of its own, which has Playwright. RUN is the folder of the run that is
shown; the program makes it grow. Any error, also one in the browser's console, ends it with a
traceback; screenshots go to the folder in `SCREENSHOTS`, if that is set.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright  # type: ignore[import-not-found]

chromium, address, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
expect.set_options(timeout=60_000)


def shoot(page: "Page", name: str) -> None:
    if place := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{place}/viewer-{name}.png")


def look_at_the_overview(page: "Page") -> None:
    page.goto(address)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert "token=" not in page.url
    reward, turns = (
        page.get_by_role("figure").filter(has=page.get_by_role("heading", name=name, exact=True))
        for name in ("Reward", "Turns")
    )
    expect(reward).to_be_visible()
    expect(page.get_by_role("region", name="Alarms")).to_contain_text("are equal")
    assert page.locator(".chart .alarm").count() >= 1
    reward.locator("svg").focus()
    page.keyboard.press("Home")
    expect(reward.locator(".readout")).to_contain_text("step 1")
    expect(turns.locator(".readout")).to_contain_text("step 1")
    for name in (
        "Reward of shop",
        "Accuracy of shop",
        "Accuracy of easy",
        "Resting rows",
        "Pools of demo",
    ):
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
    shoot(page, "overview")


def look_at_a_live_run(page: "Page") -> None:
    """A step is written: the page shows it without being asked."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cell = page.locator("table").first.locator("tbody td").nth(1)
    expect(cell).to_have_text(str(rows[-1]["step"]))
    steps = sorted((folder / "trajectories").glob("step-*.jsonl"))
    new = f"step-{rows[-1]['step'] + 1:04d}"
    for written in folder.glob(f"t*/{steps[-1].stem}.*"):
        written.with_stem(new).write_bytes(written.read_bytes())
    with path.open("a") as file:
        next_row = {"step": rows[-1]["step"] + 1, "accuracy_heldout": None}
        file.write(json.dumps(rows[-1] | next_row) + "\n")
    expect(cell).to_have_text(str(rows[-1]["step"] + 1))
    accuracy = page.locator("table").first.locator("tbody td").nth(3)
    known = accuracy.inner_text()  # an evaluation beside training comes later than its step's line
    *before, last = path.read_text().splitlines()
    late = path.with_suffix(".tmp")
    other = 0.5625 if known.endswith("0.438") else 0.4375  # the second theme finds the first's
    amended = json.loads(last) | {"accuracy_heldout": other}
    late.write_text("".join(f"{line}\n" for line in (*before, json.dumps(amended))))
    late.replace(path)
    expect(accuracy).not_to_have_text(known)
    page.get_by_role("link", name=f"Open {new}").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"Step {rows[-1]['step'] + 1}")


def look_at_a_step(page: "Page") -> None:
    found = page.locator("p[role=status]")
    everything = found.inner_text()
    tools = page.get_by_role("table", name="Tools").locator("tbody tr")
    expect(tools).to_have_text(re.compile("add16"))
    shoot(page, "step")
    page.locator(".histogram button").first.click()
    expect(found).not_to_have_text(everything)
    expect(page.locator(".histogram button").first).to_have_attribute("aria-pressed", "true")
    assert page.url.endswith("?bins=0"), page.url
    page.get_by_role("button", name="Clear filters").click()
    expect(found).to_have_text(everything)
    for label, value in (
        ("Histogram of", "part: style"),
        ("Status", "length"),
        ("Environment", "sums"),
        ("Tool outcome", "tool_error"),
        ("Branches", "history_edited"),
    ):
        page.get_by_role("combobox", name=label).select_option(value)
        if label != "Histogram of":
            expect(found).not_to_have_text(everything)
        page.get_by_role("button", name="Clear filters").click()
        expect(found).to_have_text(everything)
    page.get_by_role("searchbox").fill("onerror")
    expect(found).to_have_text(re.compile("^1 trajectory of"))
    expect(tools.locator("td")).to_have_text(["add", "1", "1", "100 %"])
    page.get_by_label("Status").select_option("length")
    page.get_by_role("link", name=re.compile("has branches$")).click()
    expect(page.locator(".message.failed header").first).to_contain_text("error")
    page.go_back()
    expect(page.get_by_role("searchbox")).to_have_value("onerror")
    expect(page.get_by_label("Status")).to_have_value("length")
    expect(found).to_have_text(re.compile("^1 trajectory of"))
    page.get_by_role("button", name="Clear filters").click()
    expect(found).to_have_text(everything)
    page.get_by_label("Order").select_option("spread")
    page.locator(".group a").first.click()
    expect(page.locator(".columns section")).to_have_count(4)
    expect(page.locator(".columns .message").first).to_be_visible()
    page.get_by_role("link", name="All of step-").click()
    expect(found).to_have_text(everything)


def look_at_a_trajectory(page: "Page") -> None:
    """The one with markup in its answer, two branches and a failed call."""
    page.get_by_role("searchbox").fill("onerror")
    expect(page.locator("p[role=status]")).to_have_text(re.compile("^1 trajectory of"))
    page.locator(".samples a:not(.out)").first.click()
    expect(page.locator(".message").first).to_be_visible()
    assert page.locator("main img, main script").count() == 0, "text became markup"
    expect(page.get_by_role("table", name="Row of the data")).to_have_text("answer<b>7</b>")
    expect(page.get_by_role("main")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.get_by_role("main")).to_contain_text("sampled tokens")
    tree = page.get_by_role("navigation", name="Turns and branches")
    expect(tree).to_contain_text("2 branches")
    expect(tree).to_contain_text("history_edited")
    shoot(page, "conversation")
    page.get_by_role("tab", name="Tokens").click()
    detail = page.locator(".detail")
    token = page.locator(".token:not(.context)").first
    token.hover()
    expect(detail).to_contain_text("log-prob")
    expect(detail).to_contain_text("weight version")
    page.get_by_role("button", name=re.compile("^Jump to the")).click()
    chosen = page.locator(".token.on")
    expect(chosen).to_have_count(1)
    assert re.search(r"turn=\d+&token=\d+", page.url), page.url
    for name in ("trainer's log-prob", "advantage", "ratio", "staleness"):
        expect(detail).to_contain_text(name)
    page.get_by_label("Colour by").select_option("advantage")
    assert "color=advantage" in page.url
    shoot(page, "tokens")
    turn = re.search(r"turn=(\d+)", page.url)
    assert turn is not None
    expect(tree.locator("[aria-current=true]")).to_have_attribute("data-turn", turn[1])
    before = chosen.get_attribute("data-at")
    page.get_by_role("listbox").focus()
    page.keyboard.press("ArrowLeft")
    expect(chosen).not_to_have_attribute("data-at", before)
    for measure in page.get_by_label("Colour by").locator("option").all():
        page.get_by_label("Colour by").select_option(measure.get_attribute("value"))
    page.get_by_role("tab", name="Template").click()
    panel = page.get_by_role("tabpanel", name="Template")
    expect(panel).to_contain_text("There is no rendering to compare with: the tokenizer in")
    page.go_back()
    page.get_by_role("tab", name="Timeline").click()
    expect(page.locator(".timeline tbody tr")).to_have_count(3)
    expect(page.locator(".timeline")).to_contain_text("worker-1")
    expect(page.locator(".timeline thead th").nth(5)).to_have_text("In all")
    expect(page.locator(".timeline tbody tr").first.locator("td").nth(4)).to_have_text("2")
    page.get_by_role("tab", name="What if").click()
    page.get_by_label("Change message").select_option("2")
    expect(page.get_by_label("Its new text")).to_be_enabled()
    expect(page.get_by_label("From turn")).to_be_disabled()
    page.go_back()
    page.go_back()
    # The address leads back to the token.
    at, link = chosen.get_attribute("data-at"), page.url
    page.goto("about:blank")
    page.goto(link)
    expect(page.locator(".token.on")).to_have_attribute("data-at", at)
    tree.get_by_role("button", name=re.compile("^turn 2")).click()
    expect(tree.locator("[aria-current=true]")).to_have_text(re.compile("turn 2"))
    page.keyboard.press("j")
    expect(page.locator("h1")).not_to_contain_text("sample 1")


def look_at_a_long_trajectory(page: "Page") -> None:
    """Only the rows in sight of 32,000 tokens are on the page."""
    page.goto(address.split("?")[0] + f"#/run/{folder.name}/rollouts/0?tab=tokens&turn=0&token=0")
    expect(page.locator(".token.on")).to_have_count(1)
    page.get_by_role("listbox").focus()
    page.keyboard.press("End")
    expect(page.locator(".token.on")).to_have_attribute("data-at", re.compile("319.."))
    assert page.locator(".tokens .item").count() < 120


def look_at_a_recorded_run(page: "Page") -> None:
    """A run over HTTP, whose agent begins again: branches, calls, times, and the template."""
    page.goto(address.split("?")[0] + "#/run/careful-agent/step-0012")
    page.get_by_role("combobox", name="Branches").select_option("history_changed")
    page.locator(".samples a:not(.out)").first.click()
    tree = page.get_by_role("navigation", name="Turns and branches")
    expect(tree).to_contain_text("history_changed")
    first = page.locator(".message").first
    expect(first).to_have_attribute("aria-label", "user message")
    shoot(page, "branches")
    for button in tree.get_by_role("button").all():
        button.click()
        expect(first).to_have_attribute("aria-label", "user message")
        expect(page.locator(".message").last.get_by_role("link")).to_contain_text("turn ")
    page.get_by_role("tab", name="Template").click()
    expect(page.get_by_role("tabpanel", name="Template")).to_contain_text("Identical.")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Timeline")).to_be_focused()
    expect(page.locator(".timeline tbody th").first).to_have_text("turn 0")
    for column in (1, 2, 3):  # the queue, the first token and sampling are known
        expect(page.locator(".timeline tbody td").nth(column)).not_to_have_text("–")
    shoot(page, "timeline")
    page.get_by_role("tab", name="Tokens").click()
    page.locator(".token:not(.context)").first.click()
    detail = page.get_by_role("region", name="Token")
    expect(detail).to_contain_text("worker-0")
    expect(detail).to_contain_text("checksum")
    expect(detail).to_contain_text("auditexact")
    expect(detail.get_by_role("link", name="Link to it")).to_have_attribute(
        "href", re.compile(r"turn=\d+&token=0")
    )


def look_at_a_problem_in_both_recorded_runs(page: "Page") -> None:
    """The same evaluation of the other run is beside it; another step can be chosen."""
    page.goto(address.split("?")[0] + "#/run/careful-agent/eval-0010")
    page.locator(".group a").first.click()
    expect(page.locator("h1")).to_have_text(re.compile("heldout"))
    problem = page.locator("h1").inner_text()
    for run in ("careful-agent", "calculator"):
        samples = page.get_by_role("region", name=f"{run}, Held-out, step 10")
        expect(samples.locator(".message.user").first).to_be_visible()
        expect(samples.locator(".message.assistant").first).to_be_visible()
    asked = page.locator(".message.user .said").all_inner_texts()
    assert len({*asked}) == 1, "the same question"
    shoot(page, "beside")
    page.get_by_label("Beside calculator").select_option("eval-0012")
    expect(page.get_by_role("region", name="calculator, Held-out, step 12")).to_be_visible()
    page.get_by_label("Another step of this run").select_option("eval-0012")
    expect(page.locator(".beside > section")).to_have_count(3)
    page.get_by_label("Beside calculator").select_option("")
    expect(page.locator(".beside > section")).to_have_count(2)
    page.locator(".sample a").first.click()
    page.get_by_role("link", name="Its group").click()
    expect(page.locator("h1")).to_have_text(problem)


def look_at_pictures(page: "Page") -> None:
    """Images are where they were, and at their tokens; in an exported page, too."""
    live = address.split("?")[0] + f"#/run/{folder.name}/eval-0015/0"
    for place in (live, (folder.parent / "pictures.html").as_uri()):
        page.goto("about:blank")
        page.goto(place)
        if place != live:
            page.locator(".samples a").first.click()
        images = page.locator(".message .picture img")
        expect(images).to_have_count(2)
        expect(page.locator(".message.user .picture figcaption")).to_have_text(
            "56 × 84 png · 6 tokens"
        )
        for image in images.all():
            expect(image).to_have_attribute("alt", "image, 56 × 84 pixels")
            wide = "image => image.decode().then(() => image.naturalWidth)"
            assert image.evaluate(wide) == 56
        expect(page.locator(".chip", has_text="images")).to_have_text("images1")
        shoot(page, "picture")
        page.get_by_role("tab", name="Tokens").click()
        page.locator("#token-11").click()
        expect(page.locator(".token img")).to_have_count(2)
        chosen, detail = page.locator(".token.on"), page.locator(".detail")
        expect(chosen).to_have_attribute("data-at", "11")
        expect(detail).to_contain_text("its token1 of 6")
        expect(detail).to_contain_text("image56 × 84 png")
        assert detail.locator("img").evaluate(wide) == 56
        page.get_by_role("listbox").focus()
        page.keyboard.press("ArrowRight")
        expect(detail).to_contain_text("its token2 of 6")
        page.keyboard.press("End")
        expect(detail.locator("img")).to_have_count(0)
        shoot(page, "picture-tokens")


def look_at_an_exported_page(page: "Page") -> None:
    page.goto((folder.parent / "page.html").as_uri())
    expect(page.locator(".group, .message").first).to_be_visible()
    page.locator(".samples a").first.click()
    page.get_by_role("tab", name="Tokens").click()
    page.locator(".token:not(.context)").first.hover()
    expect(page.locator(".detail")).to_contain_text("weight version")
    page.get_by_role("tab", name="Template").click()
    expect(page.get_by_role("tabpanel", name="Template")).to_contain_text("There is no rendering")


LOOKS: tuple[Callable[["Page"], None], ...] = (
    look_at_the_overview,
    look_at_a_live_run,
    look_at_a_step,
    look_at_a_trajectory,
    look_at_a_long_trajectory,
    look_at_a_recorded_run,
    look_at_a_problem_in_both_recorded_runs,
    look_at_pictures,
    look_at_an_exported_page,
)


def main() -> None:
    complaints: list[Any] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": 1280, "height": 800}, color_scheme=scheme
            )
            context.set_default_timeout(60_000)
            page = context.new_page()
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            for look in LOOKS:
                look(page)
                assert complaints == [], (look.__name__, complaints)
                sys.stdout.write(f"{scheme}: {look.__name__}\n")
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
