// The samples of a report: a search among groups, and the groups of one question. All texts are set as textContent.
"use strict";
(() => {
  let runs = [];
  const PAGE = 20;
  const LONG = 400;
  const BEGINNING = 160;
  const at = (id) => document.getElementById(id);

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children); // a string becomes a text node
    return made;
  }

  const run = () => runs[Number(at("samples-run").value)];
  const isRight = (answer) => answer.reward >= run().success;
  const isReplayed = (answer) => answer.replayed_from !== null;
  const number = (value) => String(Number(value.toPrecision(3)));
  const fresh = (sample) => sample.answers.filter((answer) => !isReplayed(answer));
  const replayed = (sample) => sample.answers.filter(isReplayed);

  function paged(list, more, items, shown) {
    let next = 0;
    const add = () => {
      list.append(...items.slice(next, next + PAGE).map(shown));
      next += PAGE;
      more.hidden = next >= items.length;
    };
    list.replaceChildren();
    more.onclick = add;
    add();
  }

  function said(parts) {
    const whole = element("div", "said", ...parts.map(([writer, text]) => element("span", writer, text)));
    const text = parts.map((part) => part[1]).join("");
    if (text.length <= LONG) return whole;
    const summary = element("summary", "", `${text.length} characters`);
    summary.append(element("span", "beginning", `: ${text.slice(0, BEGINNING)} …`));
    return element("details", "", summary, whole);
  }

  function marks(answer) {
    const shown = [
      element("span", isRight(answer) ? "right" : "wrong", `${isRight(answer) ? "✓" : "✗"} reward ${number(answer.reward)}`),
      element("span", "", `${answer.tokens} tokens`),
    ];
    if (!answer.finished) shown.push(element("span", "", "cut at the length limit"));
    if (isReplayed(answer)) shown.push(element("span", "replayed", whence(answer)));
    return element("div", "marks", ...shown);
  }

  function whence(answer) {
    const entropy = answer.entropy === null ? "" : `, entropy ${number(answer.entropy)} nats`;
    return `replayed from step ${answer.replayed_from}${entropy}`;
  }

  const shownAnswer = (answer) => element("div", "answer", marks(answer), said(answer.parts));

  function column(title, answers) {
    return element("div", "", element("h5", "", title), ...answers.map(shownAnswer));
  }

  function rightOf(answers) {
    return `${answers.filter(isRight).length} of ${answers.length} right`;
  }

  function shownGroup(sample) {
    const columns = element("div", "columns", column(`Fresh answers: ${rightOf(fresh(sample))}`, fresh(sample)));
    const stored = replayed(sample);
    columns.append(column(stored.length ? "Replayed answers" : "No replayed answer", stored));
    const title = element("h4", "", `Step ${sample.step}${sample.followed ? ", a followed question" : ""}`);
    const expected = element("div", "said", `Expected: ${sample.gold}`);
    return element("article", "group", title, said([["question", sample.text]]), expected, columns);
  }

  // What a reader has asked for stays when a page that follows its runs takes new steps.
  const ASKED = ["samples-run", "samples-words", "samples-step", "samples-kind", "story-question"];
  const asked = {};

  // The words of a group in small letters: those of its question, and those of each answer.
  const words = new WeakMap();
  function wordsOf(sample) {
    if (!words.has(sample)) {
      const answers = sample.answers.map((answer) => answer.parts.map((part) => part[1]).join("").toLowerCase());
      words.set(sample, { head: `${sample.text} ${sample.gold}`.toLowerCase(), answers });
    }
    return words.get(sample);
  }

  function stepsAsked() {
    const found = /^\s*(\d+)\s*(?:[-–]\s*(\d+)\s*)?$/.exec(at("samples-step").value);
    return found ? [Number(found[1]), Number(found[2] ?? found[1])] : [0, Infinity];
  }

  const KINDS = { any: () => true, right: isRight, wrong: (answer) => !isRight(answer), replayed: isReplayed };

  function found() {
    const sought = at("samples-words").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [first, last] = stepsAsked();
    const isOfKind = KINDS[at("samples-kind").value];
    return run().samples.filter((sample) => {
      if (sample.step < first || sample.step > last) return false;
      const { head, answers } = wordsOf(sample);
      const missing = sought.filter((word) => !head.includes(word));
      return sample.answers.some((answer, i) => isOfKind(answer) && missing.every((word) => answers[i].includes(word)));
    });
  }

  function search() {
    const samples = found().reverse(); // the newest first
    at("samples-count").textContent = `${samples.length} of ${run().samples.length} samples`;
    paged(at("samples-list"), at("samples-more"), samples, shownGroup);
  }

  function shownVisit(sample) {
    const [answers, stored] = [fresh(sample), replayed(sample)];
    const of = answers.length ? rightOf(answers) : "only replayed";
    const title = element("h4", "", `Step ${sample.step}: ${of}`);
    const from = element("div", "marks", ...stored.map((answer) => element("span", "replayed", whence(answer))));
    const right = answers.filter(isRight).slice(0, 1);
    const wrong = answers.filter((answer) => !isRight(answer)).slice(0, 1);
    const columns = element("div", "columns", column(right.length ? "First right answer" : "No right answer", right));
    columns.append(column(wrong.length ? "First wrong answer" : "No wrong answer", wrong));
    return element("article", "group", title, from, columns);
  }

  function svg(tag, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  }

  function plot(visits) {
    const asked = visits.filter((sample) => fresh(sample).length);
    const [first, last] = [visits[0].step, visits[visits.length - 1].step];
    const x = (sample) => (last > first ? 45 + (630 * (sample.step - first)) / (last - first) : 360);
    const y = (sample) => 95 - (80 * fresh(sample).filter(isRight).length) / fresh(sample).length;
    const label = `right answers at ${asked.length} visits from step ${first} to step ${last}`;
    const drawn = svg("svg", { viewBox: "0 0 700 125", role: "img", "aria-label": label });
    drawn.append(
      svg("path", { d: "M45 15V95H680" }),
      svg("text", { x: 5, y: 19 }, "all"),
      svg("text", { x: 5, y: 99 }, "none"),
      svg("text", { x: 45, y: 117 }, `step ${first}`),
      svg("text", { x: 680, y: 117, "text-anchor": "end" }, `step ${last}`),
      svg("path", { d: asked.map((sample, i) => `${i ? "L" : "M"}${x(sample)} ${y(sample)}`).join("") }),
    );
    for (const sample of asked) {
      drawn.append(svg("circle", { cx: x(sample), cy: y(sample), r: 4, class: replayed(sample).length ? "replayed" : "" }));
    }
    return drawn;
  }

  function tell() {
    const question = Number(at("story-question").value);
    const visits = run().samples.filter((sample) => sample.followed && sample.question === question);
    const key = element("div", "marks", element("span", "right", "● right of the fresh answers"),
      element("span", "replayed", "● with a replayed answer"));
    at("story-plot").replaceChildren(...(visits.length > 1 ? [plot(visits), key] : [])); // one point says nothing
    const head = element("article", "group", said([["question", visits[0].text]]));
    head.append(element("div", "said", `Expected: ${visits[0].gold}`));
    paged(at("story-list"), at("story-more"), visits, shownVisit);
    at("story-list").prepend(head);
  }

  function choose() {
    const visits = Map.groupBy(run().samples.filter((sample) => sample.followed), (sample) => sample.question);
    const stories = [...visits.values()].sort((one, other) => other.length - one.length); // the longest story first
    const options = stories.map(([{ question, text }, ...later]) => {
      const times = later.length ? `${later.length + 1} visits` : "1 visit";
      const option = element("option", "", `${text.length > 60 ? `${text.slice(0, 60)}…` : text} (${times})`);
      option.value = String(question);
      return option;
    });
    at("story-question").replaceChildren(...options);
    ask("story-question");
    at("story").hidden = !stories.length;
    if (stories.length) tell();
    search();
  }

  function ask(id) {
    if (id in asked) at(id).value = asked[id];
    if (at(id).selectedIndex === -1) at(id).selectedIndex = 0; // what was asked for is not here
  }

  let waiting;
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 120);
  };

  function start() {
    const source = at("samples-data");
    if (!source) return;
    runs = JSON.parse(source.textContent);
    for (const id of ASKED) {
      ask(id);
      at(id).addEventListener("input", () => (asked[id] = at(id).value));
    }
    at("samples-run").parentElement.hidden = runs.length < 2;
    at("samples-run").onchange = choose;
    at("samples-words").oninput = soon;
    at("samples-step").oninput = soon;
    at("samples-kind").onchange = search;
    at("story-question").onchange = tell;
    choose();
  }

  document.addEventListener("renewed", start);
  start();
})();
