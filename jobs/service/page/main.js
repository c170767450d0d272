  // --- the page: its address says what is asked ------------------------------------------------------------------------

  let running = null;
  let shownTab = null;
  let turn = 0; // which question the page shows: what comes late for another is dropped
  function address() {
    const [tab, query] = location.hash.slice(1).split("?");
    return { tab: TABS[tab] ? tab : "op", asked: Object.fromEntries(new URLSearchParams(query || "")) };
  }
  function go(tab, values, ask = true) {
    const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== undefined));
    if (!ask) query.set("edit", "1");
    const hash = `#${tab}${query.size ? `?${query}` : ""}`;
    if (location.hash === hash) show();
    else location.hash = hash;
  }
  async function show() {
    const { tab, asked } = address();
    const page = TABS[tab];
    const mine = ++turn;
    running?.abort();
    if (shownTab !== null && shownTab !== tab) scrollTo({ top: 0, behavior: "instant" }); // another tab begins at its top
    shownTab = tab;
    for (const link of document.querySelectorAll(".top nav a")) link.toggleAttribute("aria-current", false);
    $(`tab-${tab}`).setAttribute("aria-current", "page");
    const title = FORMS[tab]?.title || page.title;
    document.title = `${title} · opcast`;
    $("heading").textContent = title;
    $("lead").textContent = FORMS[tab]?.lead || page.lead;
    $("result").replaceChildren();
    $("error").hidden = true;
    $("status").textContent = "";
    const old = $("question");
    const form = make("form", { id: "question", class: "card", autocomplete: "off", novalidate: true });
    old.replaceWith(form);
    form.parentElement.classList.toggle("alone", Boolean(page.alone));
    try {
      await page.form(form, asked);
    } catch (error) {
      return complain(error, form, tab);
    }
    if (mine !== turn) return;
    fill(form, asked);
    if (page.alone) return ask(tab, page, form, true);
    form.append(make("div", { class: "asks" }, make("button", { class: "main", type: "submit" }, "Ask")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      forgive(form);
      try { valuesOf(form); go(tab, textsOf(form)); } catch (error) { complain(error, form, tab); }
    });
    const settings = Object.keys(asked).filter((name) => name !== "edit");
    if (settings.length > 1 && !asked.edit) ask(tab, page, form, false);
    else if (page.example && !settings.length) ask(tab, page, form, true);
  }
  // How far a search is, from its stream.
  function progressed({ done, total }) {
    const bar = $("progress");
    bar.hidden = false;
    if (total) { bar.max = total; bar.value = done; } else bar.removeAttribute("value");
    $("far").textContent = total ? `${done.toLocaleString("en")} of ${total.toLocaleString("en")} points` : "laying out the space";
  }
  async function ask(tab, page, form, quiet) {
    const mine = (running = new AbortController());
    const button = form.querySelector("button.main");
    if (button) button.disabled = true;
    const began = performance.now();
    const waited = () => Math.floor((performance.now() - began) / 1e3);
    $("status").textContent = "Asking …";
    $("far").textContent = "";
    $("progress").hidden = true;
    const clock = setInterval(() => { $("status").textContent = `Asking … ${waited()} s`; }, 1000);
    const waiting = setTimeout(() => { $("waiting").hidden = false; if (!quiet) inView($("answer")); }, 400);
    $("cancel").onclick = () => mine.abort();
    try {
      const made = await page.answer(valuesOf(form), mine.signal);
      if (mine.signal.aborted) return;
      $("status").textContent = page.alone ? "" : quiet ? "An example, answered. Change what you like and press Ask." : `Answered in ${seconds((performance.now() - began) * 1e3)}.`;
      const keep = made.figures && make("p", { class: "caption" }, make("button", { type: "button", onclick: () => pin(tab, made.body, made.figures) }, "Pin to compare"));
      $("result").replaceChildren(...[...made.shown, keep, made.path && elsewhere(tab, made.path, made.body, made.found)].filter(Boolean));
      for (const shown of made.shown) shown?.dispatchEvent(new Event("shown"));
      scrollHints();
      if (!quiet) inView($("answer"));
    } catch (error) {
      if (error.name === "AbortError" || mine.signal.aborted) { if (running === mine) $("status").textContent = "Cancelled."; } else complain(error, form, tab);
    } finally {
      clearInterval(clock);
      clearTimeout(waiting);
      if (running === mine) $("waiting").hidden = true;
      if (button) button.disabled = false;
    }
  }
  // An answer or error that is not in view is brought there.
  function inView(element) {
    const { top } = element.getBoundingClientRect();
    const head = document.querySelector(".top").offsetHeight;
    if (top < head || top > innerHeight * 0.5) element.scrollIntoView({ block: "start", behavior: "instant" });
  }
  function complain(error, form, tab) {
    $("status").textContent = "";
    if (atField(form, tab, error)) return;
    $("error").textContent = error.message;
    $("error").hidden = false;
    inView($("answer"));
  }
  // Tables that are wider than the window say so.
  function scrollHints() {
    for (const box of document.querySelectorAll("#result .scroll")) {
      const more = box.scrollWidth > box.clientWidth + 1;
      let hint = box.previousElementSibling;
      if (!hint?.classList.contains("sideways")) { hint = make("p", { class: "sideways" }, "Scroll the table sideways for all columns →"); box.before(hint); }
      hint.hidden = !more;
    }
  }
  addEventListener("resize", scrollHints);
  window.addEventListener("hashchange", show);
  show();
