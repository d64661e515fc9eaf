// Takes the new page when a run has gone on. Plots, zooms, switches and open details stay as they are.
"use strict";
(() => {
  const SECONDS = 2;

  async function look() {
    const told = document.getElementById("followed");
    try {
      const version = await text("version");
      if (version !== document.querySelector("main").dataset.version) renew(await text("./"));
      else told.hidden = true;
    } catch {
      told.hidden = false;
      told.textContent = "The program that follows the runs does not answer: this is what it showed last.";
    }
    setTimeout(look, 1000 * SECONDS);
  }

  async function text(place) {
    const answer = await fetch(place, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    return answer.text();
  }

  function renew(page) {
    const place = scrollY;
    const old = document.querySelector("main");
    const main = document.adoptNode(new DOMParser().parseFromString(page, "text/html").querySelector("main"));
    for (const plot of old.querySelectorAll(".plot.drawn")) {
      const fresh = main.querySelector(`#${CSS.escape(plot.id)}`);
      if (!fresh) continue;
      plot.dataset.link = fresh.dataset.link;
      fresh.replaceWith(plot);
    }
    const open = new Set([...old.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
    for (const summary of main.querySelectorAll("details > summary")) {
      if (open.has(summary.textContent)) summary.parentElement.open = true;
    }
    old.replaceWith(main);
    scrollTo(scrollX, place);
    document.dispatchEvent(new Event("renewed"));
  }

  setTimeout(look, 1000 * SECONDS);
})();
